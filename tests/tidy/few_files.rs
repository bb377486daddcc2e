//! A new kind of router, all-to-all algorithm or dtype of rows between ranks takes few files, because
//! somebody adds these again and again.
//!
//! One of each is the model: the cosine router, the ring, MXFP8. Whoever adds another one edits the
//! files that name the model, so these are counted, and `CONTRIBUTING.md` lists them. Tests, pages,
//! benches and examples are not counted: there everybody chooses what to show.

use super::{files, read, root};
use moesaic::kernel::Target;
use moesaic::mesh::{AllToAll, CommDtype};
use moesaic::plan::{PlanOptions, Training, plan};
use moesaic::spec::{LayerSpec, RouterKind};
use std::collections::BTreeSet;
use std::path::Path;

/// A file that has the model's word for something else.
struct ByChance {
    file: &'static str,
    meaning: &'static str,
}

/// A model, with what names it.
struct Model {
    /// The heading of its list in `CONTRIBUTING.md`.
    heading: &'static str,
    /// Its word, which counts alone, as a part of a longer name, and in the plural.
    word: &'static str,
    /// Other names that it alone has. They count wherever they stand.
    names: Vec<String>,
    /// Where the word has several meanings, names of which a file has to have one, too.
    beside: &'static [&'static str],
    /// The files in which the word means something else.
    by_chance: &'static [ByChance],
    /// The most files.
    most: usize,
}

#[test]
fn a_kind_of_router_is_in_ten_files() {
    let def = RouterKind::Cosine.def();
    let weights = def.weights().map(|weight| weight.name.to_string());
    let option = def.size.as_ref().expect("a size");
    let option = option.key.trim_start_matches("router.").to_string();
    Model {
        heading: "## How do I add a kind of router?",
        word: def.name,
        names: weights.chain([option]).chain(own_entries()).collect(),
        beside: &[],
        by_chance: &[
            ByChance {
                file: "targets/sim/ptx/src/code/decode/float.rs",
                meaning: "PTX's cosine of an angle",
            },
            ByChance {
                file: "targets/sim/ptx/src/code/op/arithmetic.rs",
                meaning: "PTX's cosine of an angle",
            },
            ByChance {
                file: "targets/sim/ptx/src/machine/lanes/float.rs",
                meaning: "PTX's cosine of an angle",
            },
        ],
        most: 10,
    }
    .check();
}

#[test]
fn an_all_to_all_algorithm_is_in_six_files() {
    Model {
        heading: "## How do I add an all-to-all algorithm?",
        word: AllToAll::Ring.row().name,
        names: Vec::new(),
        beside: &[],
        by_chance: &[
            ByChance {
                file: "cli/src/inspect/html/roofline.rs",
                meaning: "circles of places for a label around a dot",
            },
            ByChance {
                file: "codegen/spec/src/hf/families/shared.rs",
                meaning: "a model's name",
            },
            ByChance {
                file: "runtime/collectives/src/core/mod.rs",
                meaning: "a bell rings",
            },
            ByChance {
                file: "runtime/collectives/src/progress_thread.rs",
                meaning: "a bell rings",
            },
            ByChance {
                file: "runtime/planner/src/model/collective.rs",
                meaning: "how libraries reduce, which no strategy chooses",
            },
            ByChance {
                file: "targets/cpu/src/pool.rs",
                meaning: "a bell rings",
            },
        ],
        most: 6,
    }
    .check();
}

#[test]
fn a_dtype_of_rows_between_ranks_is_in_six_files() {
    Model {
        heading: "## How do I add a dtype of rows between ranks?",
        word: CommDtype::Mxfp8.row().name,
        names: Vec::new(),
        // MXFP8 is a format of weights, too.
        beside: &["comm_dtype", "CommDtype"],
        by_chance: &[],
        most: 6,
    }
    .check();
}

/// Returns the entries that a cosine router's layer has and a linear router's has not, other than
/// the projection that every formula may begin with.
fn own_entries() -> BTreeSet<String> {
    let entries = |router: &str| -> BTreeSet<String> {
        let shape = "shape = { model_dim = 8, hidden_dim = 8, experts = 4, top_k = 2 }";
        let spec = LayerSpec::from_toml(&format!("{shape}\nrouter = {{ {router} }}"));
        let target: Target = "cpu:avx2".parse().expect("a target");
        let options = PlanOptions::training(Training::default());
        let plan = plan(&spec.expect("a spec"), target, &options).expect("a plan");
        let kernels = plan.kernels.iter();
        let symbols = kernels.flat_map(|kernel| kernel.entries.iter().map(|e| e.symbol.clone()));
        symbols.collect()
    };
    // The projection has a bias, so that both have an entry for its gradient.
    let linear = entries("kind = \"linear\", bias = true");
    let own = &entries("kind = \"cosine\", projection_dim = 4") - &linear;
    let own: BTreeSet<String> = own.into_iter().filter(|e| e != "gate_project").collect();
    assert!(own.contains("gate_cosine_bwd"), "{own:?}");
    own
}

impl Model {
    fn check(&self) {
        let mut found = self.files();
        for known in self.by_chance {
            assert!(
                found.remove(known.file),
                "{} has no {} any more: {}",
                known.file,
                self.word,
                known.meaning
            );
        }
        assert!(
            found.len() <= self.most,
            "{} files name {}, and {} is the most: {found:#?}",
            found.len(),
            self.word,
            self.most
        );
        let listed = self.listed();
        assert_eq!(
            found, listed,
            "files that name {}, and those that CONTRIBUTING.md lists",
            self.word
        );
    }

    /// Returns the files that name the model.
    fn files(&self) -> BTreeSet<String> {
        let all = files(&root(), &[".rs", ".tera", ".py", ".toml", ".h", ".c"]);
        let below = all.iter().map(|path| {
            let below = path.strip_prefix(root()).expect("below the root");
            (path, below)
        });
        let product = below.filter(|(_, below)| is_product(below));
        let named = product.filter(|(path, _)| self.is_named_in(&without_tests(&read(path))));
        named
            .map(|(_, below)| below.display().to_string())
            .collect()
    }

    fn is_named_in(&self, text: &str) -> bool {
        let plural = format!("{}s", self.word);
        let word = words(text).any(|word| word == self.word || word == plural);
        let beside = self.beside.is_empty() || self.beside.iter().any(|name| text.contains(name));
        word && beside || self.names.iter().any(|name| text.contains(name))
    }

    /// Returns the files that the page for contributors lists.
    fn listed(&self) -> BTreeSet<String> {
        let page = read(&root().join("CONTRIBUTING.md"));
        let (_, section) = page.split_once(self.heading).expect(self.heading);
        let section = section.split("\n## ").next().unwrap_or_default();
        let quoted = section.split('`').skip(1).step_by(2);
        let files = quoted.filter(|text| root().join(text).is_file());
        let files = files.filter(|text| is_product(Path::new(text)));
        files.map(str::to_string).collect()
    }
}

/// Returns whether a file is neither a test, a page, a bench nor an example.
fn is_product(file: &Path) -> bool {
    let mut parts = file.iter().map(|part| part.to_string_lossy());
    !parts.any(|part| {
        let folders = ["tests", "docs", "benches", "examples", "recipes", "fuzz"];
        folders.contains(&&*part) || part == "tests.rs" || part.ends_with("_tests.rs")
    })
}

/// Returns the text of a file before its unit tests.
fn without_tests(text: &str) -> String {
    let code = text.split("#[cfg(test)]\nmod tests {").next();
    code.unwrap_or_default().to_string()
}

/// Returns the words of a text in small letters: `RowPath::Ring` has `row`, `path` and `ring`.
fn words(text: &str) -> impl Iterator<Item = String> {
    let names = text.split(|c: char| !c.is_ascii_alphanumeric());
    names.flat_map(|name| {
        let mut list = vec![String::new()];
        let mut before = ' ';
        for c in name.chars() {
            if c.is_ascii_uppercase() && before.is_ascii_lowercase() {
                list.push(String::new());
            }
            list.last_mut()
                .expect("a word")
                .push(c.to_ascii_lowercase());
            before = c;
        }
        list
    })
}

#[test]
fn words_are_found_in_names() {
    let text = "AllToAll::Ring(2), COSINE_LOGITS, gate_cosine_bwd; `String` of \"mxfp8\"";
    let found: BTreeSet<String> = words(text).collect();
    for word in ["ring", "cosine", "mxfp8", "string"] {
        assert!(found.contains(word), "{word}: {found:?}");
    }
    assert_eq!(without_tests("a\n#[cfg(test)]\nmod tests {\nb"), "a\n");
}
