"""jaxspec: speculative decoding for large language models in JAX on (pp, tp, dcp) meshes."""

from jaxspec.engine.output import RequestOutput, StreamChunk, StreamToken
from jaxspec.errors import UserError
from jaxspec.llm import LLM
from jaxspec.mesh import MeshShape
from jaxspec.sampling_params import SamplingParams

__all__ = ["LLM", "MeshShape", "RequestOutput", "SamplingParams", "StreamChunk", "StreamToken", "UserError"]
