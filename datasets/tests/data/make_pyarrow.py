"""Writes pyarrow.parquet files beside this script: the same 60 texts in every way that pyarrow
stores strings. Run with pyarrow 26.0; the files are committed, so the tests need no Python."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

here = Path(__file__).parent
texts = [None if i % 7 == 3 else f"text {i % 20} \u00fc \U0001f980\n" for i in range(60)]
nested = [{"tags": [f"t{i}"] * (i % 3), "at": {"x": i}} for i in range(60)]
for name, kind, options in [
    ("plain_snappy", pa.string(), {"compression": "snappy", "use_dictionary": False}),
    ("large_zstd", pa.large_string(), {"compression": "zstd", "use_dictionary": False}),
    ("dictionary_zstd", pa.large_string(), {"compression": "zstd", "use_dictionary": True}),
    ("categories_snappy", pa.dictionary(pa.int32(), pa.string()), {"compression": "snappy"}),
    ("view_v2_pages", pa.string_view(), {"compression": "zstd", "data_page_version": "2.0"}),
]:
    table = pa.table(
        {
            "meta": pa.array(nested),
            "text": pa.array(texts, pa.string()).cast(kind) if not pa.types.is_dictionary(kind)
            else pa.array(texts, pa.string()).dictionary_encode(),
            "score": pa.array([i / 10 for i in range(60)]),
        }
    )
    pq.write_table(table, here / f"pyarrow_{name}.parquet", row_group_size=17, **options)
