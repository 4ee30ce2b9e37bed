"""Other methods that adapt a ViT's compute, as RoundModels: same backbone, same loop, same counter of MACs.

One file per method. They are registered as a user's own kind is. A plain ViT is a ProgResViT with one round and without
PSG: :func:`progresvit.config.plain_vit`.
"""

from progresvit.model.kinds import register

for kind, name in {
    "thinkingvit": "ThinkingViT",
    "hydravit": "HydraViT",
    "sortednet": "SortedNet",
    "matformer": "MatFormer",
    "dynabert": "DynaBERT",
    "early_exit": "EarlyExit",
}.items():
    module = f"{__name__}.{kind}"
    register(kind, config=f"{module}:{name}Config", model=f"{module}:{name}")
