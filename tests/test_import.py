"""The core needs torch, numpy and safetensors, and imports nothing else."""

import subprocess
import sys


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_abnn_imports_no_other_library() -> None:
    code = (
        "import sys, torch, numpy, safetensors.torch\n"
        "before = {m.split('.')[0] for m in sys.modules}\n"
        "import abnn\n"
        "after = {m.split('.')[0] for m in sys.modules}\n"
        "print(sorted(m for m in after - before if m not in sys.stdlib_module_names))\n"
    )
    assert run(code).strip() == "['abnn']"


def test_the_core_works_where_no_other_library_is_installed() -> None:
    code = (
        "import sys, tempfile\n"
        "names = 'torchvision timm transformers sklearn typer rich torchmetrics laplace'\n"
        "for name in [*names.split(), 'pyarrow', 'matplotlib']:\n"
        "    sys.modules[name] = None\n"
        "import torch, abnn\n"
        "from torch import nn\n"
        "net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))\n"
        "bnn = abnn.convert(net)\n"
        "data = [(torch.randn(8, 4), torch.randint(3, (8,)))]\n"
        "print(abnn.fit(bnn, data, steps=2, validation=data))\n"
        "print(bnn.samples_curve(data, max_samples=4))\n"
        "with tempfile.TemporaryDirectory() as run:\n"
        "    bnn.predict_loader(data, samples='auto', out=f'{run}/preds')\n"
        "    bnn.save(run)\n"
        "    print(abnn.evaluate(abnn.load(run, net), data, ood={'same': data}))\n"
    )
    assert "AUROC" in run(code)


def test_every_public_name_has_a_docstring_with_an_example() -> None:
    import abnn

    for name in abnn.__all__:
        thing = getattr(abnn, name)
        if callable(thing) and not issubclass(
            thing if isinstance(thing, type) else object, Exception
        ):
            assert thing.__doc__, name
            assert ">>>" in thing.__doc__, name
