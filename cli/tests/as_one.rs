//! `moesaic run` over ranks has what one process has: losses, gradients, places and records.

use crate::common::*;
use moesaic::weights::Checkpoint;
use moesaic::{DType, Tensor, Tensors};
use std::fs;
use std::path::Path;

/// A layer, what its call is told, and how its loss is called in one process, which counts
/// over its own tokens.
struct Case {
    spec: &'static str,
    more: &'static [&'static str],
    renamed: Option<(&'static str, &'static str)>,
}

const SHAPE: &str = "name = \"small\"\n\
    shape = { model_dim = 20, hidden_dim = 12, experts = 5, top_k = 2 }\n";

/// Every kind of loss, every mode that drops, every selection that looks at all tokens.
const CASES: [Case; 4] = [
    Case {
        spec: "router = { noise = 2.0, renormalize = \"sum\" }
capacity = { mode = \"factor\", factor = 0.8, renormalize_after_drop = true }
losses = [
    { kind = \"z\", coefficient = 0.2 },
    { kind = \"switch\", coefficient = 0.3 },
    { kind = \"gshard\", coefficient = 0.4 },
    { kind = \"gshard-all\", coefficient = 0.5 },
    { kind = \"sequence\", coefficient = 0.6, sequence_length = 4 },
    { kind = \"importance-load\", coefficient = 0.7 },
]",
        more: &["--grad", "--seed", "5"],
        renamed: None,
    },
    Case {
        spec: "router = { noise = 2.0 }
capacity = { mode = \"bounded\", factor = 0.9, order = \"probability\" }
losses = [
    { kind = \"global\", coefficient = 0.3 },
    { kind = \"sequence\", coefficient = 0.6 },
    { kind = \"importance-load-logits\", coefficient = 0.7 },
]",
        more: &["--grad", "--recompute", "all"],
        renamed: Some(("global", "switch")),
    },
    Case {
        spec: "router = { select = { sinkhorn = 3 } }
capacity = { mode = \"fixed\", rows = 2, order = \"token-major\" }
losses = [{ kind = \"z\", coefficient = 0.2 }]",
        more: &["--grad"],
        renamed: None,
    },
    Case {
        spec: "router = { select = { expert-choice = 1.0 } }",
        more: &["--grad"],
        renamed: None,
    },
];

const GRIDS: [&str; 3] = ["ep=2", "ep=2,expert_tp=2", "ep=2,dp=2"];

fn input() -> Tensors<'static> {
    let mut tensors = small_input();
    tensors.insert("dy".to_string(), tensor(&[7, 20], 6));
    let sequences = vec![0, 0, 1, 1, 1, 2, 2];
    tensors.insert("sequence_ids".to_string(), Tensor::owned(&[7], sequences));
    tensors
}

/// Integers are the same, floats to the rounding of other sums.
fn same(found: &Path, expected: &Path, renamed: Option<(&str, &str)>, what: &str) {
    let [found, expected] = [found, expected].map(|path| Checkpoint::open(path).unwrap());
    for name in expected.names() {
        let own = match renamed {
            Some((ranks, one)) if name == format!("loss.{one}") => format!("loss.{ranks}"),
            _ => name.to_string(),
        };
        let (a, b) = (found.read(&own).unwrap(), expected.read(name).unwrap());
        assert_eq!((a.dtype, &a.shape), (b.dtype, &b.shape), "{name} of {what}");
        let (a, b) = (a.to_f64(), b.to_f64());
        let most = b.iter().fold(0f64, |most, v| most.max(v.abs()));
        let pairs = a.iter().zip(&b);
        let worst = pairs.fold(0f64, |most, (a, b)| most.max((a - b).abs()));
        let allowed = match expected.read(name).unwrap().dtype {
            DType::I32 | DType::I64 => 0.0,
            _ => 2e-5 * most,
        };
        assert!(worst <= allowed, "{name} of {what}: {a:?} is not {b:?}");
    }
    assert_eq!(found.names().count(), expected.names().count(), "{what}");
}

#[test]
fn losses_gradients_and_places_are_those_of_one_process() {
    for case in &CASES {
        let text = format!("{SHAPE}{}\n", case.spec);
        let text = if case.spec.contains("expert-choice") {
            text.replace("top_k = 2", "top_k = 5")
        } else {
            text
        };
        let small = Small::of(&text);
        save(small.dir.path(), "x.safetensors", &input());
        let file = |name: &str| small.dir.path().join(name);
        let record = file("record").display().to_string();
        let alone = match case.renamed {
            Some((ranks, one)) => text.replace(ranks, one),
            None => text.clone(),
        };
        write(small.dir.path(), "small.toml", &alone);
        small
            .run(&[case.more, &["--record", &record]].concat())
            .ok();
        fs::rename(&small.output, file("one")).unwrap();
        fs::rename(&record, file("record-one")).unwrap();
        write(small.dir.path(), "small.toml", &text);
        for grid in GRIDS {
            let what = format!("--mesh {grid}: {text}");
            let more = ["--mesh", grid, "--record", &record];
            small.run(&[case.more, &more].concat()).ok();
            same(&small.output, &file("one"), case.renamed, &what);
            same(Path::new(&record), &file("record-one"), None, &what);
        }
    }
}

/// Blocks go over the ranks' borders, whether or not the record asks for what the tokens of all
/// ranks decide.
#[test]
fn blocks_of_tokens_are_those_of_one_process() {
    let router = "router = { blocks = { tokens = 3, experts = 2 } }";
    let small = Small::of(&format!("{SHAPE}{router}\n"));
    save(small.dir.path(), "x.safetensors", &input());
    let one = small.dir.path().join("one");
    small.run(&["--grad"]).ok();
    fs::rename(&small.output, &one).unwrap();
    let record = small.dir.path().join("record").display().to_string();
    for grid in GRIDS {
        for more in [&["--grad"][..], &["--grad", "--record", &record]] {
            small.run(&[more, &["--mesh", grid]].concat()).ok();
            same(
                &small.output,
                &one,
                None,
                &format!("{more:?} --mesh {grid}"),
            );
        }
    }
}
