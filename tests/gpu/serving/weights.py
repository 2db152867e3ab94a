"""Seeded weights: values that follow from the name of each parameter alone."""

import zlib

import torch

_ENLARGED = ("qkv", "q_proj", "kv_a_proj", "kv_proj", "sinks")


def seed_weights(model: torch.nn.Module) -> None:
    """Give each parameter values that follow from its name alone.

    Every process then has the same model. Projections of queries and keys are larger, so that a
    wrong key changes the output. Embeddings that the model enlarges, as Gemma does, are as much
    smaller, so that they do not outweigh attention. Tokens choose their experts by their class, far
    from ties.
    """
    enlarges = any(name.endswith("normalizer") for name, _ in model.named_buffers())
    with torch.no_grad():
        for name, param in model.named_parameters():
            if not param.is_floating_point():
                continue
            if param.dim() < 2 and "sinks" not in name:
                param.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            terms = param[0].numel() if "conv" in name else param.shape[-1]
            std = 1.0 if "embed" in name and not enlarges else terms**-0.5
            if any(part in name for part in _ENLARGED):
                std *= 2.0
            generator = torch.Generator(device=param.device)
            generator.manual_seed(zlib.crc32(name.encode()))
            param.normal_(0.0, std, generator=generator)
        _route_by_token(dict(model.named_parameters()))


def _route_by_token(params: dict[str, torch.Tensor]) -> None:
    """Let the class of a token, its id modulo the number of experts, choose its experts.

    With random routers, rounding selects other experts where two of them are nearly equal: in
    bfloat16 for 3, 9, 19 and 39 of 600 tokens in four layers (4 experts, 2 per token). The last
    elements of the hidden state are therefore kept for the class. The embedding writes them, the
    routers read them alone, and no layer changes them. The first six experts of a token differ by 2
    divided by the size of its hidden state.
    """
    routers = [
        weight for name, weight in params.items() if name.endswith("router.weight")
    ]
    if not routers:
        return
    experts, hidden = routers[0].shape
    own = slice(hidden - experts, hidden)
    for name, param in params.items():
        if name.endswith("embedding.weight"):
            tokens = torch.arange(len(param), device=param.device)
            param[:, own] = 0.0
            for rank in range(min(experts, 6)):
                column = hidden - experts + (tokens + rank) % experts
                param[tokens, column] = 2.0 * (min(experts, 6) - 1 - rank)
        elif name.endswith("o_proj.weight"):
            param[own] = 0.0
        elif name.endswith(("w2_weight", "w2_bias")):
            param[:, own] = 0.0
        elif name.endswith("router.weight"):
            param.fill_(0.0)
            param[:, own] = torch.eye(experts)
