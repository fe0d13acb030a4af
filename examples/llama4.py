"""Llama 4: one expert a token, weighted by the sigmoid of its logit.

The model multiplies the expert's input, one row an expert, so it wants the weights over all experts: `probs` holds the
weight of the pick and 0 elsewhere. Run it with ``python examples/llama4.py``.
"""

import torch

import moesaic as mo

router = mo.Router(
    num_experts=16, top_k=1, score="sigmoid", order="topk_then_score", outputs=("probs", "weights", "indices", "counts")
)


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits = torch.randn(4, 16, dtype=torch.bfloat16, device=device)

    route = mo.compile(router)
    r = route(logits)

    print(f"backend {route.backend}: 4 tokens, 16 experts")
    print("token  expert  weight  weights over all experts")
    for token, (expert, weight, probs) in enumerate(zip(r.indices[:, 0], r.weights[:, 0], r.probs)):
        dense = " ".join(f"{p:.2f}" if p else "   ." for p in probs.tolist())
        print(f"{token:5}  {expert:6}  {weight:6.3f}  {dense}")


if __name__ == "__main__":
    main()
