from infra.local.engine import Engine, EngineError, engine_missing

__all__ = ["Engine", "EngineError", "engine_missing"]
