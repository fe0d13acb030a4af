"""A score that no library ships: log1p(softplus(x)).

Like softplus it is positive, smooth and never saturates on the left; but it grows only with the logarithm of the logit,
so that one large logit cannot push the weights of the other picks to zero. Nothing but the expression is needed: the
compiler derives its gradient, sees that it is strictly increasing (and ranks on the logits), and fuses it with the
selection. Run it with ``python examples/log_score.py``.
"""

import torch

import moesaic as mo

router = mo.Router(
    num_experts=60,
    top_k=6,
    score=lambda x: mo.math.log1p(mo.math.softplus(x)),
    renormalize=True,
)
softmax = mo.Router(num_experts=60, top_k=6, score="softmax", renormalize=True)


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits = torch.randn(2, 60, device=device)
    logits[1, 7] = 12.0  # an outlier

    print("token  score     expert:weight")
    for name, declared in (("softmax", softmax), ("log", router)):
        r = mo.compile(declared)(logits)
        for token, (experts, weights) in enumerate(zip(r.indices.tolist(), r.weights.tolist())):
            print(f"{token:5}  {name:8}  " + "  ".join(f"{e:2}:{w:.3f}" for e, w in zip(experts, weights)))


if __name__ == "__main__":
    main()
