"""Mixtral: softmax over all experts, the best two, their weights divided by their sum.

The oldest of the sparse routers and still the commonest kind. Run it with ``python examples/mixtral.py``; a GPU is used
if there is one.
"""

import torch

import moesaic as mo

router = mo.Router(num_experts=8, top_k=2, score="softmax", renormalize=True)


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits = torch.randn(4, 8, dtype=torch.bfloat16, device=device)

    route = mo.compile(router)
    r = route(logits)

    print(f"backend {route.backend}: 4 tokens, 8 experts")
    print("token  expert:weight")
    for token, (experts, weights) in enumerate(zip(r.indices.tolist(), r.weights.tolist())):
        print(f"{token:5}  " + "  ".join(f"{e}:{w:.3f}" for e, w in zip(experts, weights)))
    print(f"tokens of each expert: {r.counts.tolist()}")


if __name__ == "__main__":
    main()
