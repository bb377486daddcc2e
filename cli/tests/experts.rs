//! `moesaic experts`.

use crate::common;
use crate::common::{Finished, Small, load, moesaic, save, small_weights, tensor, write};
use moesaic::Tensors;
use moesaic::weights::Checkpoint;
use std::ffi::OsStr;
use std::fs;
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
    for margin in ["nan", "inf", "1e300", "-1"] {
        let margin = ["--margin", margin];
        experts(&[&wrong[..], &margin].concat()).fails(2, &["a margin is a number, 0 or more"]);
    }
}

/// The weights of the small layer as two ranks of Tutel hold them.
fn tutel_ranks(dir: &Path) -> (String, [String; 2]) {
    let spec = "\
name = \"tutel\"
shape = { model_dim = 20, hidden_dim = 12, experts = 6, top_k = 2 }
experts = { form = \"plain\", activation = \"gelu\" }
";
    let spec = write(dir, "tutel.toml", spec);
    let rank = |seed| {
        let tensors = Tensors::from([
            ("moe.gates.0.wg.weight".to_string(), tensor(&[6, 20], 1)),
            (
                "moe.experts.batched_fc1_w".to_string(),
                tensor(&[3, 12, 20], seed),
            ),
            (
                "moe.experts.batched_fc2_w".to_string(),
                tensor(&[3, 12, 20], seed + 1),
            ),
        ]);
        let file = save(dir, &format!("rank{seed}.safetensors"), &tensors);
        file.to_str().expect("a UTF-8 path").to_string()
    };
    let spec = spec.to_str().expect("a UTF-8 path").to_string();
    (spec, [rank(2), rank(4)])
}

#[test]
fn ranks_of_another_library_become_one_layer() {
    let small = Small::new();
    let dir = small.dir.path();
    let (spec, [first, second]) = tutel_ranks(dir);
    let whole = path(dir, "whole.safetensors");
    let import = |more: &[&str]| {
        let args = ["import", "--spec", &spec, "-o", &whole];
        experts(&[&args[..], more].concat())
    };
    let made = import(&["--keys", "tutel", &first, &second]).ok();
    assert!(made.contains("whole.safetensors: 6 experts"), "{made}");
    let (_, shape, down) = load(Path::new(&whole), "experts.down.weight");
    assert_eq!(shape, [6, 20, 12]);
    // The last expert's rows and columns are those of the second rank, swapped.
    let (_, _, theirs) = load(Path::new(&second), "moe.experts.batched_fc2_w");
    assert_eq!(down[5 * 240 + 7 * 12 + 3], theirs[2 * 240 + 3 * 20 + 7]);
    import(&[&first, &second]).fails(2, &["--keys tutel or fastmoe"]);
    import(&["--keys", "tutel", &first, &second, &first, &second])
        .fails(2, &["6 experts cannot lie evenly in 4 files"]);
    let text = fs::read_to_string(&spec).expect("the spec");
    fs::write(&spec, format!("{text}\nprecision.weights = \"bf16\"\n")).expect("a spec");
    let ranks = ["--keys", "tutel", &first, &second];
    import(&ranks).fails(2, &["--narrow"]);
    import(&[&ranks[..], &["--narrow"]].concat()).ok();
    import(&["--keys", "fastmoe", &first]).fails(2, &["read as fastmoe's: no name ends with"]);
}

#[test]
fn a_layer_runs_with_the_names_of_another_library() {
    let small = Small::new();
    let dir = small.dir.path();
    let (spec, [first, second]) = tutel_ranks(dir);
    let (whole, ours) = (
        path(dir, "whole.safetensors"),
        path(dir, "ours.safetensors"),
    );
    let import = ["import", "--spec", &spec, "--keys", "tutel", "-o", &whole];
    experts(&[&import[..], &[&first, &second]].concat()).ok();
    // All six experts in one file, by Tutel's names.
    let mut dict = Tensors::new();
    for name in [
        "gates.0.wg.weight",
        "experts.batched_fc1_w",
        "experts.batched_fc2_w",
    ] {
        let [first, second] = [&first, &second].map(|file| {
            let file = Checkpoint::open(file).expect("a file");
            file.read(&format!("moe.{name}")).expect("a tensor")
        });
        let mut joined = first;
        if name.starts_with("experts") {
            joined.shape[0] = 6;
            joined.data = [&*joined.data, &second.data].concat().into();
        }
        dict.insert(format!("blocks.1.{name}"), joined);
    }
    let theirs = save(dir, "theirs.safetensors", &dict);
    let theirs = theirs.to_str().expect("a UTF-8 path");
    let run = |weights: &str, more: &[&str]| {
        let input = path(dir, "x.safetensors");
        let args = [
            "run",
            "--target",
            "cpu",
            "--spec",
            &spec,
            "--weights",
            weights,
        ];
        let files = ["--input", &input, "--output", &ours];
        moesaic([&args[..], &files, more].concat()).ok();
        load(Path::new(&ours), "y").2
    };
    let expected = run(&whole, &[]);
    assert_eq!(run(theirs, &["--keys", "tutel"]), expected);
    assert_eq!(
        run(
            theirs,
            &["--keys", "tutel", "--prefix", "blocks.1", "--gate", "0"]
        ),
        expected
    );
}

#[test]
fn a_capacity_by_a_factor_is_kept_for_calls_of_one_size() {
    let small = Small::of(&format!(
        "{}capacity = {{ mode = \"factor\", factor = 1.25 }}\n",
        common::SMALL
    ));
    let dir = small.dir.path();
    let (spec, weights) = (path(dir, "small.toml"), path(dir, "w.safetensors"));
    let more = path(dir, "more.safetensors");
    let add = |tokens: &[&str]| {
        let args = [
            "add",
            "--spec",
            &spec,
            "--weights",
            &weights,
            "--copy",
            "1",
            "-o",
            &more,
        ];
        experts(&[&args[..], tokens].concat())
    };
    add(&[]).fails(2, &["say for how many tokens a call it is to be kept"]);
    let made = add(&["--tokens", "7"]).ok();
    assert!(
        made.contains("6 experts; the layer computes the same in calls of 7 to 10 tokens"),
        "{made}"
    );
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
    // Whole experts; unequal numbers of them; halves of experts.
    for (number, slices) in [(5, "1"), (2, "1"), (4, "2")] {
        let count = number.to_string();
        let whole_layer = ["--spec", &spec, "--weights", &weights];
        let cut = ["--ranks", &count, "--expert-tp", slices, "-o", &parts];
        experts(&[&["shard"], &whole_layer[..], &cut].concat()).ok();
        let ranks: Vec<String> = (0..number)
            .map(|r| part(&format!("rank-{r}.safetensors")))
            .collect();
        let mut unshard = vec![
            "unshard",
            "--spec",
            &spec,
            "--expert-tp",
            slices,
            "-o",
            &whole,
        ];
        unshard.extend(ranks.iter().map(String::as_str));
        std::fs::remove_file(&whole).expect("it was there");
        experts(&unshard).ok();
        assert_eq!(bytes(&whole), bytes(&weights));
    }
    shards_of_shared_experts(&parts, &whole);
    let six = ["--weights", &weights, "--ranks", "6", "-o", &parts];
    let refused = experts(&[&["shard", "--spec", &spec], &six[..]].concat());
    refused.fails(2, &["6 groups cannot share 5 experts"]);
}

/// With slices of a shared expert, too.
fn shards_of_shared_experts(parts: &str, whole: &str) {
    let small = Small::of(&format!(
        "{}[[shared]]\nhidden_dim = 6\ngate = \"sigmoid\"\n",
        common::SMALL
    ));
    let dir = small.dir.path();
    let mut all = small_weights();
    for (part, shape) in [("gate", [6, 20]), ("up", [6, 20]), ("down", [20, 6])] {
        all.insert(format!("shared.0.{part}.weight"), tensor(&shape, 6));
    }
    all.insert("shared.0.router.weight", tensor(&[1, 20], 7));
    save(dir, "w.safetensors", &all);
    let (spec, weights) = (path(dir, "small.toml"), path(dir, "w.safetensors"));
    let sliced = ["--spec", &spec, "--expert-tp", "2", "--shared", "sharded"];
    let cut = ["shard", "--weights", &weights, "--ranks", "4", "-o", parts];
    experts(&[&cut, &sliced[..]].concat()).ok();
    let rank = |rank: usize| format!("{parts}/rank-{rank}.safetensors");
    let (_, shape, _) = load(Path::new(&rank(3)), "shared.0.up.weight");
    assert_eq!(shape, [3, 20]);
    let ranks: Vec<String> = (0..4).map(rank).collect();
    let mut unshard = vec!["unshard", "-o", whole];
    unshard.extend(sliced);
    unshard.extend(ranks.iter().map(String::as_str));
    experts(&unshard).ok();
    assert_eq!(bytes(whole), bytes(&weights));
}

/// Numbers whose sum no number can be, and a file that lacks a tensor of the layer.
#[test]
fn parts_that_are_not_the_layer_are_refused() {
    let small = Small::new();
    let dir = small.dir.path();
    let (spec, weights) = (path(dir, "small.toml"), path(dir, "w.safetensors"));
    let parts = path(dir, "parts");
    let refused = |args: &[&str], weights: &str, said: &str| {
        let whole = ["--spec", &spec, "--weights", weights, "-o", &parts];
        experts(&[args, &whole].concat()).fails(2, &[said]);
        assert!(!Path::new(&parts).exists());
    };
    let split = |counts: &'static str| ["split", "--counts", counts];
    refused(
        &split("18446744073709551615,6"),
        &weights,
        "are not the 5 experts",
    );
    let mut cut = small_weights();
    cut.remove("experts.down.weight");
    let cut = save(dir, "cut.safetensors", &cut);
    let cut = cut.to_str().unwrap();
    for args in [
        &split("3,2")[..],
        &["shard", "--ranks=2"],
        &["add", "--copy=0"],
    ] {
        refused(args, cut, "`experts.down.weight` is missing");
    }
    refused(
        &["shard", "--ranks=4", "--expert-tp=3"],
        &weights,
        "a divisor of the 4 ranks",
    );
}
