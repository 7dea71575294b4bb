"""The numbers beside the picture of the pool, by the page's own script in Node, without a browser."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import json_format

from ferrule_server.api.responses.view import block_map
from tests.tools import tool

OWNERS = np.array([0, 0, 1, 2, 2, 3, 4, 9, 0, 1], np.int32)
SCRIPT = """
const shown = {};
const element = (name) => (shown[name] ??= {});
globalThis.document = { querySelector: element, getElementById: element };
globalThis.ResizeObserver = class { observe() {} };
globalThis.matchMedia = () => ({ addEventListener() {} });
globalThis.window = {};
const { Pool } = await import("./pool.js");
new Pool({ addEventListener() {}, setAttribute() {}, clientWidth: 0 }).show(JSON.parse(process.argv[2]));
const counts = Object.entries(shown).filter(([name]) => name.startsWith("#legend"));
const texts = counts.map(([name, { textContent }]) => [name.split('"')[1], textContent]);
console.log(JSON.stringify(Object.fromEntries(texts)));
"""


@pytest.mark.parametrize(("max_cells", "cell_blocks"), [(64, 1), (3, 3)])
def test_every_count_is_a_number_whatever_a_cell_is(max_cells: int, cell_blocks: int, tmp_path: Path) -> None:
    """They are of blocks, also where a cell of the picture is several blocks."""
    node = tool("node")
    with resources.as_file(resources.files("ferrule_server.api.web") / "page") as page:
        shutil.copytree(page, tmp_path, dirs_exist_ok=True)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "shown.js").write_text(SCRIPT)
    picture = block_map(OWNERS, bytes(len(OWNERS)), max_cells)
    assert picture.cell_blocks == cell_blocks
    view = {"block_map": json_format.MessageToDict(picture, preserving_proto_field_name=True), "block_size": 16}
    view["cache_metrics"] = {"empty_blocks": "2", "used_blocks": "7", "shared_blocks": "5"}
    command = [node, str(tmp_path / "shown.js"), json.dumps(view)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "empty": "2", "cached": "0", "single": "2", "by2": "2", "by3": "1", "many": "2",
    }  # fmt: skip
