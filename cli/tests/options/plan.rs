//! The options of `plan`: those of a layer, and those of a model.

use super::Use::{Always, NotWith};
use super::{Row, WITH_SPEC, WITHOUT_MODEL};

pub const ROWS: &[Row] = &[
    ("spec", Always),
    ("hf", Always),
    ("gguf", Always),
    ("layer", WITH_SPEC),
    ("precision", Always),
    ("dequantize", WITHOUT_MODEL),
    ("world", Always),
    ("machine", Always),
    ("speed", Always),
    ("per-node", Always),
    (
        "tokens",
        NotWith(&["--tokens=1", "--counts=none"], "cannot be used with"),
    ),
    ("training", Always),
    (
        "skew",
        NotWith(&["--skew=zipf=1", "--counts=none"], "cannot be used with"),
    ),
    ("counts", Always),
    ("placement", Always),
    (
        "top",
        NotWith(
            &["--top=1", "--mesh=ep=1", "--strategy=default"],
            "cannot be used with",
        ),
    ),
    (
        "comm-dtypes",
        NotWith(
            &["--comm-dtypes=fp8", "--mesh=ep=1", "--strategy=default"],
            "cannot be used with",
        ),
    ),
    ("calibrate", Always),
    ("layers", Always),
    ("params", NotWith(&["--params=1e9"], "--layers")),
    (
        "sequence",
        NotWith(&["--sequence=8"], "--sequence is of a model"),
    ),
    ("batch", NotWith(&["--batch=8"], "--batch is of a model")),
    (
        "micro-batch",
        NotWith(&["--micro-batch=1"], "--micro-batch is of a model"),
    ),
    (
        "model-mesh",
        NotWith(&["--model-mesh=pp=1"], "--model-mesh is of a model"),
    ),
    (
        "compare",
        NotWith(&["--compare=pp=1"], "--compare is of a model"),
    ),
    (
        "overlap-batches",
        NotWith(&["--overlap-batches"], "--overlap-batches is of a model"),
    ),
    (
        "reserve",
        NotWith(&["--reserve=1GiB"], "--reserve is of a model"),
    ),
    ("fp8", NotWith(&["--fp8"], "--fp8 is of a model")),
    (
        "weight-bytes",
        NotWith(&["--weight-bytes=1"], "--weight-bytes is of a model"),
    ),
    (
        "gradient-bytes",
        NotWith(&["--gradient-bytes=4"], "--gradient-bytes is of a model"),
    ),
    (
        "optimizer-bytes",
        NotWith(&["--optimizer-bytes=12"], "--optimizer-bytes is of a model"),
    ),
    (
        "html",
        NotWith(&["--html=out.html"], "--html is of a model"),
    ),
    (
        "tokens",
        NotWith(&["--layers=2", "--tokens=1"], "--tokens is of one layer"),
    ),
    (
        "counts",
        NotWith(&["--layers=2", "--counts=none"], "--counts is of one layer"),
    ),
    (
        "placement",
        NotWith(
            &["--layers=2", "--placement=none"],
            "--placement is of one layer",
        ),
    ),
    (
        "mesh",
        NotWith(&["--layers=2", "--mesh=ep=1"], "--mesh is of one layer"),
    ),
    ("mesh", Always),
    ("strategy", NotWith(&["--strategy=default"], "--mesh")),
    ("trace", Always),
    ("json", Always),
];
