"""The operator's side: starting ranks. The trainer itself never imports it."""
