"""Docstrings are harvested without importing, cleaned, told apart by package, and capped."""

from pathlib import Path

import pytest

from bertsmith.data.docstrings import (
    Docstring,
    HarvestLimits,
    SourcePackage,
    clean,
    harvest,
    hide_names,
    installed_packages,
    names_of,
)

SENTENCE = "This sentence has enough plain words in it to be kept."


@pytest.fixture
def package(tmp_path: Path) -> SourcePackage:
    root = tmp_path / "zoo"
    (root / "tests").mkdir(parents=True)
    (root / "__init__.py").write_text(f'"""{SENTENCE}"""\nraise SystemExit("imported!")\n')
    (root / "cage.py").write_text(
        "class Cage:\n"
        '    """A cage keeps one animal away from all of the others."""\n'
        "    async def open(self):\n"
        '        """Open the door slowly and wait until the animal has left.\n\n'
        "        >>> Cage().open()  # this line is code at a prompt, not language\n\n"
        '        Too short.\n        """\n'
        "if True:\n"
        "    def feed():\n"
        "        '''Give the animal what it likes to eat in the morning.'''\n"
    )
    (root / "tests" / "test_cage.py").write_text(f'"""Not this. {SENTENCE}"""\n')
    return SourcePackage(name="zoo", root=root)


def test_module_class_and_function_docstrings_are_found_and_nothing_is_imported(
    package: SourcePackage,
) -> None:
    found = harvest([package])
    assert [(d.module, d.line, d.paragraphs) for d in found] == [
        ("zoo/__init__.py", 1, (SENTENCE,)),
        ("zoo/cage.py", 2, ("A cage keeps one animal away from all of the others.",)),
        ("zoo/cage.py", 4, ("Open the door slowly and wait until the animal has left.",)),
        ("zoo/cage.py", 12, ("Give the animal what it likes to eat in the morning.",)),
    ]


def test_odd_files_are_passed_over(package: SourcePackage) -> None:
    (package.root / "broken.py").write_text(f'"""{SENTENCE}"""\ndef (:\n')
    (package.root / "latin.py").write_bytes(b'"""\xff\xfe these are not valid bytes in utf"""')
    (package.root / "nul.py").write_bytes(b'"""\x00"""')
    (package.root / "escape.py").write_text(
        '"""An invalid \\d escape gives a warning in python."""'
    )
    (package.root / "surrogate.py").write_text(
        '"""A lone \\ud800 surrogate cannot be written as text to any file."""'
    )
    (package.root / "dangling.py").symlink_to(package.root / "nowhere.py")
    (package.root / "large.py").write_text(f'"""{SENTENCE} {"x" * 2000}"""')
    found = harvest([package], limits=HarvestLimits(source_bytes_per_file=1000))
    assert {d.module for d in found} == {"zoo/__init__.py", "zoo/cage.py", "zoo/escape.py"}


def test_a_repeated_paragraph_is_kept_once_and_a_shared_one_not_at_all(tmp_path: Path) -> None:
    for name in ("one", "two"):
        own = f"These are words that only package number {name} has to say."
        (tmp_path / f"{name}.py").write_text(
            f'"""{SENTENCE}\n\n{own}\n"""\ndef f():\n    """{own}"""\n'
        )
    found = harvest([SourcePackage(name=n, root=tmp_path / f"{n}.py") for n in ("one", "two")])
    assert [d.paragraphs for d in found] == [
        ("These are words that only package number one has to say.",),
        ("These are words that only package number two has to say.",),
    ]


def test_the_cap_on_all_text_is_shared_out_evenly(tmp_path: Path) -> None:
    packages = []
    for name, num_files in (("small", 1), ("large", 40), ("larger", 60)):
        root = tmp_path / name
        root.mkdir()
        for n in range(num_files):  # 60 bytes each with its line end, the number in two digits
            text = f"a paragraph of {name:<6} with number {n:02d} has so many words in it"
            text = text.replace("  ", " ").ljust(64, "x")
            (root / f"m{n}.py").write_text(f'"""{text}"""')
        packages.append(SourcePackage(name=name, root=root))
    found = harvest(packages, limits=HarvestLimits(text_bytes=65 * 41))
    counts = {p.name: sum(d.package == p.name for d in found) for p in packages}
    assert counts == {"small": 1, "large": 20, "larger": 20}


def test_the_harvest_does_not_depend_on_the_number_of_processes(package: SourcePackage) -> None:
    other = SourcePackage(name="cage", root=package.root / "cage.py")
    init = SourcePackage(name="init", root=package.root / "__init__.py")
    seen: list[tuple[int, int, str]] = []
    alone = harvest([package, init, other])
    together = harvest(
        [package, init, other],
        processes=2,
        on_package=lambda done, total, name: seen.append((done, total, name)),
    )
    assert alone == together
    assert seen == [(1, 3, "zoo"), (2, 3, "init"), (3, 3, "cage")]


def test_cleaning_keeps_language_and_drops_code_rulers_and_fragments() -> None:
    docstring = """First line with more than eight ordinary words,
        going on in a second line.

        Parameters
        ----------
        size : int
            How large the thing is to be made at the start.

        x = foo(bar[1:2], **kw) + {a: b for (a, b) in z.items() if q[a] != 7}

        ======  ======
        left    right
        ======  ======

        Short one.
        """
    assert clean(docstring) == (
        "First line with more than eight ordinary words, going on in a second line.",
        "Parameters size : int How large the thing is to be made at the start.",
    )


def test_names_are_hidden_as_whole_words_in_any_case_and_spelling() -> None:
    text = "NumPy arrays (np.ndarray) suit scikit-learn, sklearn.svm and snippets, not numpyro."
    assert hide_names(text, ["numpy", "sklearn"]) == (
        "package arrays (package.ndarray) suit package, package.svm and snippets, not numpyro."
    )
    assert "np" in names_of("numpy")


def test_installed_packages_start_with_the_standard_library_and_hold_our_own_dependencies() -> None:
    names = [p.name for p in installed_packages()]
    assert names[0] == "python"
    assert {"numpy", "torch", "tokenizers"} <= set(names)
    assert len(set(names)) == len(names)
    assert not any(n.startswith("_") for n in names)


def test_the_standard_library_alone_gives_plenty_of_clean_text() -> None:
    found = harvest(
        installed_packages()[:1], limits=HarvestLimits(source_bytes_per_package=5_000_000)
    )
    assert sum(len(d.text) for d in found) > 300_000
    assert all(isinstance(d, Docstring) and d.paragraphs for d in found)
    assert [(d.module, d.line) for d in found] == sorted((d.module, d.line) for d in found)
