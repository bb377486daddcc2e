//! The entries of the kernels that tests of compilers for GPUs compile: `scale` and `fill`.

use moesaic_kernel::{Access, DType, Entry, Launch, Param, ParamType, Scalar, Size};

pub fn entry(symbol: &str, threads: u32, params: Vec<Param>) -> Entry {
    let launch = Launch {
        grid: [Size::Tokens, Size::Const(1)],
        threads,
        shared_bytes: 0,
        cluster: 1,
        dependent: false,
    };
    Entry {
        symbol: symbol.to_string(),
        summary: String::new(),
        params,
        launch,
    }
}

fn float(name: &str) -> Param {
    Param {
        name: name.to_string(),
        ty: ParamType::Scalar(Scalar::F32),
        shape: String::new(),
    }
}

fn tensor(name: &str) -> Param {
    Param::tensor(name, DType::F32, Access::ReadWrite, "[tokens]")
}

fn scale_params() -> Vec<Param> {
    vec![
        float("factor"),
        tensor("in"),
        tensor("out"),
        Param::i64("count"),
        float("bias"),
    ]
}

/// Entries in another order than the text, which the report must keep.
pub fn entries() -> Vec<Entry> {
    vec![
        entry("scale", 256, scale_params()),
        entry("fill", 64, vec![tensor("out"), Param::i64("count")]),
    ]
}
