# What is built, for a person with buildx alone: run it from the repository's root.
#
#   docker buildx bake -f images/docker-bake.hcl cpu
#   REPOSITORY=registry.example.com/trainer TAG=try docker buildx bake -f images/docker-bake.hcl --push cuda
#   docker buildx bake -f images/docker-bake.hcl cuda-verify      # builds, checks, keeps nothing
#
# `fab image-build` builds the same stages of the same Dockerfiles by a bake file of its own. There is no version here: empty
# variables leave the Dockerfiles' defaults, and those are tested against versions.toml.

variable "REPOSITORY" { default = "lustrain/trainer" }
# The target stands before it: cpu-dev.
variable "TAG" { default = "dev" }
variable "PLATFORM" { default = "linux/amd64" }

# An image by digest to run on, and another one to build in.
variable "BASE_IMAGE" { default = "" }
variable "TOOLS_IMAGE" { default = "" }
# Gaudi's base has no default: its digest is yours to find (images/versions.toml).
variable "GAUDI_IMAGE" { default = "" }
variable "TORCH_CPU_LINKS" { default = "" }
# none: without EFA
variable "EFA_VERSION" { default = "" }
variable "EFA_SHA256" { default = "" }
variable "EFA_URL" { default = "" }
# MiB that a check allows an image to take; empty: any.
variable "BUDGET_MB" { default = "" }

# References in a registry: what other builds left there, and where this one leaves its own.
variable "CACHE_FROM" { default = "" }
variable "CACHE_TO" { default = "" }

# Files: certificates of a proxy between you and the package index, and credentials of that index.
variable "CA" { default = "" }
variable "NETRC" { default = "" }

group "default" {
  targets = ["cpu"]
}

target "_common" {
  context   = "."
  platforms = [PLATFORM]
  args = {
    TOOLS_IMAGE = TOOLS_IMAGE != "" ? TOOLS_IMAGE : null
  }
  secret = concat(
    CA != "" ? ["id=ca,src=${CA}"] : [],
    NETRC != "" ? ["id=netrc,src=${NETRC}"] : []
  )
  cache-from = CACHE_FROM != "" ? ["type=registry,ref=${CACHE_FROM}"] : []
  # enroot and pyxis read neither an index with attestations nor, in older versions, OCI media types:
  # https://github.com/NVIDIA/JAX-Toolbox/issues/310
  attest = ["type=provenance,disabled=true", "type=sbom,disabled=true"]
}

target "_trainer" {
  inherits   = ["_common"]
  dockerfile = "images/trainer.Dockerfile"
  args = {
    BASE_IMAGE      = BASE_IMAGE != "" ? BASE_IMAGE : null
    TORCH_CPU_LINKS = TORCH_CPU_LINKS != "" ? TORCH_CPU_LINKS : null
    EFA_VERSION     = EFA_VERSION == "none" ? "" : EFA_VERSION != "" ? EFA_VERSION : null
    EFA_SHA256      = EFA_SHA256 != "" ? EFA_SHA256 : null
    EFA_URL         = EFA_URL != "" ? EFA_URL : null
  }
}

target "_gaudi" {
  inherits   = ["_common"]
  dockerfile = "images/gaudi.Dockerfile"
  args = {
    BASE_IMAGE = GAUDI_IMAGE != "" ? GAUDI_IMAGE : null
  }
}

# ECR takes a cache only as an image manifest: https://github.com/aws/containers-roadmap/issues/876
target "_image" {
  output   = ["type=image,oci-mediatypes=false,compression=gzip"]
  cache-to = CACHE_TO != "" ? ["type=registry,ref=${CACHE_TO},mode=max,image-manifest=true,oci-mediatypes=true,ignore-error=true"] : []
}

# The check is the last step, in a stage of its own: the image that it passes has no trace of it.
target "_check" {
  output = ["type=cacheonly"]
  args = {
    BUDGET_MB = BUDGET_MB != "" ? BUDGET_MB : null
  }
}

target "cpu" {
  inherits = ["_trainer", "_image"]
  target   = "cpu"
  tags     = ["${REPOSITORY}:cpu-${TAG}"]
}

target "cpu-verify" {
  inherits = ["_trainer", "_check"]
  target   = "cpu-verify"
}

target "cuda" {
  inherits = ["_trainer", "_image"]
  target   = "cuda"
  tags     = ["${REPOSITORY}:cuda-${TAG}"]
}

target "cuda-verify" {
  inherits = ["_trainer", "_check"]
  target   = "cuda-verify"
}

target "gaudi" {
  inherits = ["_gaudi", "_image"]
  target   = "gaudi"
  tags     = ["${REPOSITORY}:gaudi-${TAG}"]
}

target "gaudi-verify" {
  inherits = ["_gaudi", "_check"]
  target   = "gaudi-verify"
}
