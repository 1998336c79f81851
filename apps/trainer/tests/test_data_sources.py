"""A corpus is the text of a folder, whole and in one order; what is left out is named."""

import os
import sys
import sysconfig
from pathlib import Path

import pytest
from olmo_trainer.data import Corpus, Document, StandardLibrary, TextFolder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for path, content in {
        "b.txt": b"second\r\n",
        "a/z.txt": "caf\u00e9".encode(),
        "a.txt": b"third",
        "a/empty.txt": b"",
        "latin.txt": b"caf\xe9",
        "notes.md": b"# notes",
        "UPPER.TXT": b"loud",
        ".hidden.txt": b"no",
        ".git/config.txt": b"no",
    }.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(content)
    return tmp_path


def test_folder_is_read_recursively_in_sorted_order_byte_for_byte(folder: Path):
    corpus = TextFolder(folder).read()
    assert corpus.documents == (
        Document("a.txt", "third"),
        Document("a/z.txt", "caf\u00e9"),
        Document("b.txt", "second\r\n"),
    )
    assert corpus.skipped == {"a/empty.txt": "empty", "latin.txt": "not UTF-8"}


def test_several_patterns_take_each_file_once(folder: Path):
    documents = TextFolder(str(folder), ("*.md", "b.*", "*.txt", "*.txt")).read().documents
    assert [document.id for document in documents] == ["a.txt", "a/z.txt", "b.txt", "notes.md"]


def test_links_and_odd_files_are_named_not_followed(folder: Path):
    (folder / "a" / "up").symlink_to(folder)
    (folder / "gone.txt").symlink_to(folder / "nowhere")
    (folder / "same.txt").symlink_to(folder / "b.txt")
    corpus = TextFolder(folder).read()
    assert "same.txt" in [document.id for document in corpus.documents]
    assert corpus.skipped["a/up"] == "a link to a folder"
    assert corpus.skipped["gone.txt"] == "not a regular file"


def test_home_is_expanded(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(folder))
    assert TextFolder("~/a").read().documents[0].id == "z.txt"
    with pytest.raises(ValueError, match="~nobody-here/a` must be a folder, found nothing"):
        TextFolder("~nobody-here/a").read()


def test_missing_or_empty_folders_say_what_to_do(folder: Path):
    with pytest.raises(ValueError, match=r"nowhere` must be a folder, found nothing; put UTF-8"):
        TextFolder(folder / "nowhere").read()
    with pytest.raises(ValueError, match=r"b\.txt` must be a folder, found a file; put UTF-8"):
        TextFolder(folder / "b.txt").read()
    with pytest.raises(ValueError, match=r"must hold files named '\*\.rst', found none; put UTF-8"):
        TextFolder(folder, "*.rst").read()
    with pytest.raises(
        ValueError, match=r"'empty.txt' or 'l\*', found none \(left out: 1 empty, 1 not UTF-8\)"
    ):
        TextFolder(folder, ["empty.txt", "l*"]).read()


def test_unreadable_folder_is_an_error_not_a_gap(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ValueError, match=r"must be readable, got .*Permission denied.*a\.txt"):
        TextFolder(folder).read()


def test_unreadable_subfolder_is_an_error_not_a_gap(folder: Path, monkeypatch: pytest.MonkeyPatch):
    scandir = os.scandir

    def refuse(path: str):
        if Path(path).name == "a":
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ValueError, match=r"must be readable, got .*Permission denied.*/a'"):
        TextFolder(folder).read()


@pytest.mark.parametrize("pattern", ["", [], ["*.txt", ""]])
def test_empty_patterns_are_refused(pattern: str | list[str]):
    with pytest.raises(ValueError, match="`pattern` must be one or more file name patterns"):
        TextFolder(".", pattern)


@pytest.mark.parametrize("pattern", ["**/*.txt", "books\\*.txt"])
def test_patterns_with_folders_are_refused(pattern: str):
    with pytest.raises(ValueError, match=r"`pattern` must match file names, got .* give only the"):
        TextFolder(".", pattern)


@pytest.fixture(scope="module")
def library() -> Corpus:
    return StandardLibrary().read()


def test_standard_library_is_some_megabytes_of_text(library: Corpus):
    assert 1e6 < sum(len(document.text) for document in library.documents) < 50e6
    assert len(library.documents) > 100
    by_id = {document.id: document.text for document in library.documents}
    own_folder = Path(sysconfig.get_paths()["stdlib"])
    assert by_id["json/decoder.py"] == (own_folder / "json/decoder.py").read_bytes().decode()


def test_standard_library_is_sorted_and_the_same_twice(library: Corpus):
    ids = [document.id for document in library.documents]
    assert ids == sorted(set(ids))
    assert StandardLibrary().read() == library


def test_standard_library_holds_no_tests_tables_or_installed_packages(library: Corpus):
    for document in library.documents:
        folders = document.id.split("/")[:-1]
        assert not {"test", "tests", "site-packages", "__pycache__"} & set(folders)
        module = document.id.split("/")[0].removesuffix(".py")
        assert module in sys.stdlib_module_names
        assert module not in {"encodings", "pydoc_data"}


def test_interpreter_without_sources_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "json.py").write_text("x = 1")
    (tmp_path / "sitecustomize.py").write_text("x = 1")
    with pytest.raises(ValueError, match=r"must hold `.py` files, found none; .*`TextFolder`"):
        StandardLibrary().read()
