//! The ratios over PyTorch in COMPARE are those of the files that it names: of each line the
//! fastest of PyTorch's ways, and the fastest of those that leave weights as they are.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// Where the weights' order is PyTorch's own choice.
const REORDERED: &str = "torch-packed";

/// Ways and how much longer than ours each takes, by layer, tokens and pass.
type Lines = BTreeMap<(String, String, String), Vec<(String, f64)>>;

fn read(path: &str) -> String {
    let path = Path::new(crate::ROOT).join(path);
    fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// What a run of `cargo bench -p moesaic-benches --bench layer` printed, routed evenly.
fn measured(file: &str) -> Lines {
    let (mut lines, mut layer, mut ways) = (Lines::new(), String::new(), Vec::new());
    for line in read(&format!("benches/results/{file}")).lines() {
        let words: Vec<String> = line.split_whitespace().map(String::from).collect();
        if line.starts_with("routing ") {
            let names = words.iter().filter(|word| word.starts_with("torch-"));
            ways = names.cloned().collect();
        } else if let Some((title, _)) = line.split_once(": ")
            && title.ends_with(" threads")
        {
            layer = title.to_string();
        } else if line.starts_with("uniform ")
            && let Some((_, ratios)) = line.split_once('|')
        {
            let ratios = ratios.split_whitespace();
            let ratios = ratios.filter_map(|word| word.parse().ok());
            let key = (layer.clone(), words[1].clone(), words[2].clone());
            lines.insert(key, ways.iter().cloned().zip(ratios).collect());
        }
    }
    lines
}

/// The title of a layer in a file, and the pass, from COMPARE's words for it.
fn named(what: &str) -> (String, &'static str) {
    let threads = if what.contains("one thread") { 1 } else { 2 };
    let dtype = if what.contains("bf16") { "bf16" } else { "f32" };
    let shape = if what.starts_with("Qwen3") {
        "qwen3"
    } else {
        "olmoe-half"
    };
    let pass = if what.contains("both passes") {
        "both"
    } else {
        "forward"
    };
    (format!("{shape} {dtype}, {threads} threads"), pass)
}

/// `(eager) 1.3` after some words: the way and the ratio.
fn claimed(cell: &str, after: &str) -> Option<(String, String)> {
    let (_, rest) = cell.split_once(after)?;
    let (way, rest) = rest.strip_prefix(" (")?.split_once(") ")?;
    let ratio = rest.split([';', ' ']).next()?;
    Some((format!("torch-{way}"), ratio.to_string()))
}

fn check(what: &str, tokens: &str, found: Option<(String, String)>, ways: &[&(String, f64)]) {
    let least = ways.iter().min_by(|a, b| a.1.total_cmp(&b.1));
    let (way, ratio) = least.expect("a way of PyTorch");
    let digits = if *ratio < 10.0 { 1 } else { 0 };
    let want = (way.clone(), format!("{ratio:.digits$}"));
    assert_eq!(found, Some(want), "{what}, {tokens}");
}

#[test]
fn ratios_over_pytorch_are_those_of_its_fastest_way() {
    let files = ["layer-fastest.txt", "layer-zen4.txt"].map(|file| (file, measured(file)));
    let (mut from, mut checked) = (None, 0);
    for line in read("docs/COMPARE.md").lines() {
        let cells: Vec<&str> = line.split(" | ").collect();
        let [what, size, .., over, source] = &cells[..] else {
            continue;
        };
        if !source.starts_with("the same") {
            from = files.iter().find(|(file, _)| source.contains(file));
        }
        let (Some((_, lines)), true) = (from, over.starts_with("PyTorch (")) else {
            continue;
        };
        let (what, tokens) = (
            what.trim_start_matches("| "),
            size.trim_start_matches("T = "),
        );
        let (layer, pass) = named(what);
        let key = (layer, tokens.to_string(), pass.to_string());
        let ways = &lines
            .get(&key)
            .unwrap_or_else(|| panic!("no line of {key:?}"));
        assert!(ways.iter().any(|(way, _)| way == "torch-eager"), "{key:?}");
        let all: Vec<_> = ways.iter().collect();
        check(what, tokens, claimed(over, "PyTorch"), &all);
        if let Some(others) = claimed(over, "with weights as they are") {
            let kept: Vec<_> = ways.iter().filter(|(way, _)| way != REORDERED).collect();
            check(what, tokens, Some(others), &kept);
        }
        checked += 1;
    }
    assert!(checked > 20, "{checked} ratios");
}
