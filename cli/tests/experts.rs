//! `moesaic experts`.

mod common;

use common::{Finished, Small, load, moesaic};
use std::ffi::OsStr;
use std::path::Path;

fn experts<A: AsRef<OsStr>>(args: &[A]) -> Finished {
    let first: &OsStr = "experts".as_ref();
    moesaic(std::iter::once(first).chain(args.iter().map(AsRef::as_ref)))
}

fn path(dir: &Path, name: &str) -> String {
    dir.join(name).to_str().expect("a UTF-8 path").to_string()
}

fn bytes(file: &str) -> Vec<u8> {
    std::fs::read(file).unwrap_or_else(|e| panic!("{file}: {e}"))
}

#[test]
fn a_layer_with_more_experts_runs_the_same() {
    let small = Small::new();
    let dir = small.dir.path();
    let (spec, weights) = (path(dir, "small.toml"), path(dir, "w.safetensors"));
    let (more, output) = (path(dir, "more.safetensors"), path(dir, "y.safetensors"));
    small.run(&[]).ok();
    let (_, _, before) = load(&small.output, "y");
    let add = [
        "add",
        "--spec",
        &spec,
        "--weights",
        &weights,
        "--copy",
        "1,1,4",
        "-o",
        &more,
    ];
    assert!(
        experts(&add)
            .ok()
            .contains("8 experts; the layer computes the same")
    );
    let (input, larger) = (path(dir, "x.safetensors"), path(dir, "more.toml"));
    let run = [
        "run",
        "--target",
        "cpu",
        "--spec",
        &larger,
        "--weights",
        &more,
        "--input",
        &input,
        "--output",
        &output,
    ];
    moesaic(run).ok();
    let (_, _, after) = load(&small.output, "y");
    for (a, b) in before.iter().zip(&after) {
        assert!((a - b).abs() <= 1e-6 * a.abs().max(1.0), "{a} became {b}");
    }
    let wrong = [
        "add",
        "--spec",
        &spec,
        "--weights",
        &weights,
        "--copy",
        "5",
        "-o",
        &more,
    ];
    experts(&wrong).fails(2, &["no expert 5 to copy, there are 5"]);
}

#[test]
fn parts_and_shards_come_together_again() {
    let small = Small::new();
    let dir = small.dir.path();
    let (spec, weights) = (path(dir, "small.toml"), path(dir, "w.safetensors"));
    let (parts, whole) = (path(dir, "parts"), path(dir, "whole.safetensors"));
    let split = [
        "split",
        "--spec",
        &spec,
        "--weights",
        &weights,
        "--counts",
        "3,2",
        "-o",
        &parts,
    ];
    assert!(
        experts(&split)
            .ok()
            .contains("part-1.safetensors: 2 experts")
    );
    let part = |name: &str| path(&dir.join("parts"), name);
    let (first, second) = (part("part-0.safetensors"), part("part-1.safetensors"));
    experts(&["merge", &first, &second, "-o", &whole]).ok();
    assert_eq!(bytes(&whole), bytes(&weights));
    let shard = [
        "shard",
        "--spec",
        &spec,
        "--weights",
        &weights,
        "--ranks",
        "5",
        "-o",
        &parts,
    ];
    experts(&shard).ok();
    let ranks: Vec<String> = (0..5)
        .map(|r| part(&format!("rank-{r}.safetensors")))
        .collect();
    let mut unshard = vec!["unshard", "--spec", &spec, "-o", &whole];
    unshard.extend(ranks.iter().map(String::as_str));
    std::fs::remove_file(&whole).expect("it was there");
    experts(&unshard).ok();
    assert_eq!(bytes(&whole), bytes(&weights));
    experts(&[
        "shard",
        "--spec",
        &spec,
        "--weights",
        &weights,
        "--ranks",
        "2",
        "-o",
        &parts,
    ])
    .fails(2, &["5 experts cannot be shared evenly by 2 ranks"]);
}
