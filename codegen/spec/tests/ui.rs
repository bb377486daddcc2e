//! The wording of errors: `ui/*.toml` in, `ui/*.txt` out.
//!
//! `BLESS=1 cargo test -p moesaic-spec --test main ui` rewrites the expectations.

use moesaic_spec::LayerSpec;
use std::fs;
use std::path::{Path, PathBuf};

fn cases() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/ui");
    let entries = fs::read_dir(folder).expect("tests/ui can be read");
    let files = entries.map(|entry| entry.expect("an entry of tests/ui").path());
    let mut cases: Vec<PathBuf> = files
        .filter(|file| file.extension().is_some_and(|end| end == "toml"))
        .collect();
    cases.sort();
    cases
}

fn rendered(case: &Path) -> String {
    let text = fs::read_to_string(case).expect("the case can be read");
    let error = LayerSpec::from_toml(&text).expect_err("the case is invalid");
    error.render("layer.toml", false) + "\n"
}

#[test]
fn errors_read_as_expected() {
    let bless = std::env::var_os("BLESS").is_some();
    let mut differing = Vec::new();
    for case in cases() {
        let (text, file) = (rendered(&case), case.with_extension("txt"));
        if bless {
            fs::write(&file, &text).expect("the expectation can be written");
        } else if fs::read_to_string(&file).unwrap_or_default() != text {
            differing.push(format!("{}\n{text}", file.display()));
        }
    }
    assert!(
        differing.is_empty(),
        "not as expected (BLESS=1 rewrites):\n{}",
        differing.join("\n")
    );
}

#[test]
fn no_expectation_is_left_over() {
    let cases = cases();
    assert!(cases.len() >= 20, "only {} cases", cases.len());
    let folder = cases[0].parent().expect("cases lie in a folder");
    for entry in fs::read_dir(folder).expect("tests/ui can be read") {
        let file = entry.expect("an entry of tests/ui").path();
        let case = file.with_extension("toml");
        assert!(case.exists(), "{} has no case", file.display());
    }
}

#[test]
fn messages_name_no_rust() {
    for case in cases() {
        let text = rendered(&case);
        for word in ["Some(", "None", "usize", "serde", "LayerSpec", "::"] {
            assert!(!text.contains(word), "{} says {word}", case.display());
        }
    }
}

#[test]
fn colours_change_no_word() {
    let text = "[shape]\nmodel_dim = 0\nhidden_dim = 8\nexperts = 4\ntop_k = 5\n";
    let error = LayerSpec::from_toml(text).expect_err("two problems");
    let colored = error.render("a.toml", true);
    assert!(colored.contains("\u{1b}["), "no colour in {colored}");
    let mut plain = String::new();
    for (index, part) in colored.split("\u{1b}[").enumerate() {
        let visible = part
            .find('m')
            .filter(|_| index > 0)
            .map_or(0, |end| end + 1);
        plain.push_str(&part[visible..]);
    }
    assert_eq!(plain, error.render("a.toml", false));
    assert!(!error.to_string().contains("a.toml"));
    assert!(error.to_string().contains("2 problems"));
}

#[test]
fn spans_point_at_values() {
    let text = "[shape]\nmodel_dim = 64\nhidden_dim = 8\nexperts = 4\ntop_k = 5\n";
    let error = LayerSpec::from_toml(text).expect_err("top_k is too large");
    let spans: Vec<_> = error.spans().collect();
    assert_eq!(spans.len(), 1);
    assert_eq!(&text[spans[0].0.clone()], "5");
    assert_eq!(error.problems()[0].key, "shape.top_k");
    let related = &error.problems()[0].related[0];
    assert_eq!(related.key, "shape.experts");
    let at = related.span.clone().expect("experts are written there");
    assert_eq!(&text[at], "4");
}
