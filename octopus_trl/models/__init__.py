"""One Hugging Face model, a packed and a paged context."""

from octopus_trl.models.patch import head_of, prepare_model, spec_of, unwrap
from octopus_trl.models.spec import ModelSpec

__all__ = ["ModelSpec", "head_of", "prepare_model", "spec_of", "unwrap"]
