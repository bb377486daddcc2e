//! The layout of `tests/golden`: the prelude of each language once, one kernel of each template
//! in full for each target in full, and a digest of every kernel of every target.

use moesaic::cache::hash_source;
use moesaic::kernel::{KernelSource, Language};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::path::{Path, PathBuf};

/// A kernel of a layer, and what tells its template from others of its stem.
pub struct Emitted {
    /// The layer: `mixtral-8x7b`, `gpt-oss-20b.training`.
    pub case: String,
    /// Of a product the unit that multiplies.
    pub family: Option<&'static str>,
    /// The kernel.
    pub source: KernelSource,
}

impl Emitted {
    /// `grouped_gemm/mixtral-8x7b.grouped_gemm_up.cuda-sm_90a.cu`.
    pub fn file(&self) -> PathBuf {
        let source = &self.source;
        let (name, target) = (&source.name, source.target.file_name());
        let extension = source.language.extension();
        let file = format!("{}.{name}.{target}.{extension}", self.case);
        Path::new(source.stem.name()).join(file)
    }

    /// Kernels with the same are texts of one template for one target.
    fn template(&self) -> String {
        let source = &self.source;
        // Routing in one launch has a stem of several kernels.
        let alone = source.name == "route";
        let target = source.target.file_name();
        format!("{} {:?} {alone} {target}", source.stem.name(), self.family)
    }
}

/// Every golden file, by its path in `tests/golden`. In full is the first kernel of each
/// template and target for which `in_full` holds.
pub fn files(kernels: &[Emitted], in_full: impl Fn(&Emitted) -> bool) -> BTreeMap<PathBuf, String> {
    let mut preludes: Vec<Prelude> = LANGUAGES.map(Prelude::new).into();
    let (mut files, mut seen) = (BTreeMap::new(), BTreeSet::new());
    for kernel in kernels {
        if !in_full(kernel) {
            continue;
        }
        let language = kernel.source.language;
        let prelude = preludes.iter_mut().find(|p| p.language == language);
        let own = prelude
            .expect("it is of all")
            .take_from(&kernel.source.text);
        if seen.insert(kernel.template()) {
            files.insert(kernel.file(), own);
        }
    }
    files.extend(preludes.iter().map(|p| (p.file(), p.text())));
    files.insert(DIGESTS.into(), digests(kernels));
    files
}

/// A line for each kernel: its digest, its number of lines, and its name.
fn digests(kernels: &[Emitted]) -> String {
    let line = |kernel: &Emitted| {
        let text = &kernel.source.text;
        let (hash, lines) = (hash_source(text), text.lines().count());
        (kernel.file(), format!("{} {lines:>4}", &hash[..16]))
    };
    let lines: BTreeMap<PathBuf, String> = kernels.iter().map(line).collect();
    let written = |(file, digest): (PathBuf, String)| format!("{digest} {}\n", file.display());
    lines.into_iter().map(written).collect()
}

/// What of the golden text is not as expected, a line each: of kernels, which of which layer.
pub fn differences(
    golden: &BTreeMap<PathBuf, String>,
    expected: &BTreeMap<PathBuf, String>,
) -> Vec<String> {
    let names: BTreeSet<&PathBuf> = golden.keys().chain(expected.keys()).collect();
    let differs = |name: &&&PathBuf| golden.get(**name) != expected.get(**name);
    let mut lines = Vec::new();
    for name in names.iter().filter(differs) {
        let (was, is) = (golden.get(*name), expected.get(*name));
        let (was, is) = (was.map_or("", |s| s), is.map_or("", |s| s));
        if name.as_path() == Path::new(DIGESTS) {
            lines.extend(other_digests(was, is));
        } else {
            lines.push(first_difference(name, was, is));
        }
    }
    lines
}

fn first_difference(name: &Path, was: &str, is: &str) -> String {
    let same = was.lines().zip(is.lines()).take_while(|(a, b)| a == b);
    let line = same.count() + 1;
    let name = name.display();
    if is.is_empty() {
        return format!("tests/golden/{name} is of no kernel any more");
    }
    format!("tests/golden/{name} differs from what is emitted, first at line {line}")
}

/// Kernels whose digests differ, or that only one of the two lists has.
fn other_digests(was: &str, is: &str) -> Vec<String> {
    let was: BTreeSet<&str> = was.lines().collect();
    let is: BTreeSet<&str> = is.lines().collect();
    let kernels = was.symmetric_difference(&is);
    let names: BTreeSet<&str> = kernels
        .filter_map(|line| line.split(' ').next_back())
        .collect();
    let said = |name: &str| format!("{name}: its text is not the one that its digest is of");
    names.into_iter().map(said).collect()
}

const DIGESTS: &str = "digests.txt";

const LANGUAGES: [Language; 3] = [Language::C, Language::Cuda, Language::Hip];

/// What kernels of a language have in common.
struct Prelude {
    language: Language,
    templates: Vec<Template>,
    /// Pieces of text, each with its template, and where it stands there.
    pieces: BTreeSet<(usize, usize, String)>,
    /// Whose a piece is, by its text.
    known: HashMap<String, Option<usize>>,
}

/// A part of the prelude, before values are filled in.
struct Template {
    name: &'static str,
    lines: HashMap<&'static str, usize>,
}

impl Prelude {
    fn new(language: Language) -> Prelude {
        let folder = match language {
            Language::C => None,
            Language::Cuda => Some("cuda/"),
            Language::Hip => Some("hip/"),
        };
        let mut seen = HashSet::new();
        let parts = moesaic::emit::templates().filter_map(|(name, text)| {
            let name = name.strip_prefix("prelude/")?;
            let other = ["cuda/", "hip/", "sim/"].iter();
            let other = other
                .clone()
                .any(|f| name.starts_with(f) && folder != Some(f));
            (!other && seen.insert(name)).then(|| Template::new(name, text))
        });
        Prelude {
            language,
            templates: parts.collect(),
            pieces: BTreeSet::new(),
            known: HashMap::new(),
        }
    }

    fn file(&self) -> PathBuf {
        format!("prelude.{}", self.language.extension()).into()
    }

    /// Keeps what of a text is prelude. The rest comes back, with a line that says what
    /// stood where.
    fn take_from(&mut self, text: &str) -> String {
        let mut own: Vec<String> = Vec::new();
        let mut parts: Vec<&str> = Vec::new();
        // The first piece is the comment that says what the kernel is.
        for (i, piece) in pieces(text).into_iter().enumerate() {
            let whose = self.whose(&piece).filter(|_| i > 0);
            match whose {
                Some(template) => {
                    let name = self.templates[template].name;
                    if parts.last() != Some(&name) {
                        parts.push(name);
                    }
                }
                None => {
                    own.extend(stood_here(&mut parts));
                    own.push(piece);
                }
            }
        }
        own.extend(stood_here(&mut parts));
        own.join("\n")
    }

    /// The template that most lines of a piece are of, if that is more than half of them.
    fn whose(&mut self, piece: &str) -> Option<usize> {
        if let Some(known) = self.known.get(piece) {
            return *known;
        }
        let lines: Vec<&str> = piece.lines().filter(|line| !line.is_empty()).collect();
        let shared = |template: &Template| {
            let found = lines
                .iter()
                .filter(|line| template.lines.contains_key(**line));
            found.count()
        };
        let counts = self.templates.iter().map(shared).enumerate();
        let most = counts.rev().max_by_key(|(_, count)| *count);
        let whose = most.filter(|(_, count)| 2 * count > lines.len());
        let whose = whose.map(|(template, _)| template);
        if let Some(template) = whose {
            let places = &self.templates[template].lines;
            let place = lines.iter().find_map(|line| places.get(line).copied());
            let piece = (template, place.unwrap_or(0), piece.to_string());
            self.pieces.insert(piece);
        }
        self.known.insert(piece.to_string(), whose);
        whose
    }

    /// All that was kept, by template, as it stands there. What differs between targets and
    /// layers follows one another.
    fn text(&self) -> String {
        let mut text = String::new();
        let mut before = None;
        for (template, _, piece) in &self.pieces {
            if before != Some(template) {
                text += &format!(
                    "// ==== prelude/{} ====\n\n",
                    self.templates[*template].name
                );
            }
            text += piece;
            text += "\n";
            before = Some(template);
        }
        text
    }
}

impl Template {
    fn new(name: &'static str, text: &'static str) -> Template {
        let mut lines = HashMap::new();
        for (number, line) in text.lines().enumerate() {
            lines.entry(line.trim_end()).or_insert(number);
        }
        Template { name, lines }
    }
}

fn stood_here(parts: &mut Vec<&str>) -> Option<String> {
    let line = (!parts.is_empty()).then(|| format!("// [prelude: {}]\n", parts.join(", ")));
    parts.clear();
    line
}

/// A text in pieces that stand alone: what lies between empty lines, but the body of a
/// function stays whole. Each ends with a line break.
fn pieces(text: &str) -> Vec<String> {
    let mut pieces: Vec<String> = Vec::new();
    let mut after_empty = true;
    for line in text.lines() {
        if line.is_empty() {
            after_empty = true;
            continue;
        }
        let inside = line.starts_with([' ', '}']);
        match pieces.last_mut() {
            Some(piece) if !after_empty || inside => {
                if after_empty {
                    piece.push('\n');
                }
                *piece += line;
                piece.push('\n');
            }
            _ => pieces.push(format!("{line}\n")),
        }
        after_empty = false;
    }
    pieces
}

#[test]
fn a_text_falls_into_pieces() {
    let text = "// what it is\n\nint f()\n{\n    a;\n\n    b;\n}\n\nint g();\n";
    let whole = [
        "// what it is\n",
        "int f()\n{\n    a;\n\n    b;\n}\n",
        "int g();\n",
    ];
    assert_eq!(pieces(text), whole);
}

#[test]
fn a_difference_names_its_kernel() {
    let files = |digests: &str, text: &str| {
        let files = [(DIGESTS, digests), ("combine/a.combine.cpu-avx2.c", text)];
        BTreeMap::from(files.map(|(name, text)| (PathBuf::from(name), text.to_string())))
    };
    let golden = files("0f   3 combine/a.combine.cpu-avx2.c\n", "a\nb\n");
    assert!(differences(&golden, &golden).is_empty());
    let changed = files("1f   3 combine/a.combine.cpu-avx2.c\n", "a\nc\n");
    let said = differences(&golden, &changed);
    assert_eq!(said.len(), 2, "{said:?}");
    assert!(
        said[0].ends_with(
            "combine/a.combine.cpu-avx2.c differs from what is emitted, first at line 2"
        )
    );
    assert!(
        said[1].starts_with("combine/a.combine.cpu-avx2.c: "),
        "{said:?}"
    );
}
