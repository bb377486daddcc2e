//! Tests that each template begins with the true list of the names that it reads from outside.

use crate::gemm;
use crate::render;
use moesaic_kernel::{Stem, Target};
use moesaic_plan::{KernelPlan, PlanOptions, Training, plan};
use moesaic_spec::testing::sample;
use std::collections::{BTreeMap, BTreeSet};

/// Words of the template language, and names that it binds.
const LANGUAGE: [&str; 23] = [
    "if",
    "elif",
    "else",
    "endif",
    "for",
    "in",
    "endfor",
    "set",
    "set_global",
    "endset",
    "include",
    "and",
    "or",
    "not",
    "is",
    "true",
    "false",
    "none",
    "defined",
    "loop",
    "raw",
    "endraw",
    "break",
];

/// The names that one template reads and binds, in the order of its text.
#[derive(Default)]
struct Reads {
    /// Names and first fields that come from outside: `d.weights`, `entry`.
    wants: BTreeSet<String>,
    /// Names that it sets or loops over.
    binds: BTreeSet<String>,
    /// Each include with the names that are bound before it.
    includes: Vec<(String, BTreeSet<String>)>,
    /// Fields of `g` with what they are compared with.
    compared: BTreeSet<(String, String)>,
}

#[derive(Clone, Debug, PartialEq)]
enum Token {
    /// A name with its fields: `d.router.kind`.
    Path(String),
    Text(String),
    Sign(char),
}

fn tokens(tag: &str) -> Vec<Token> {
    let of_path = |c: char| c.is_alphanumeric() || c == '_' || c == '.';
    let mut list = Vec::new();
    let mut rest = tag.trim_start();
    while let Some(first) = rest.chars().next() {
        let end = match first {
            '"' | '\'' => rest[1..].find(first).map_or(rest.len(), |end| end + 2),
            _ if of_path(first) => rest.find(|c| !of_path(c)).unwrap_or(rest.len()),
            _ => first.len_utf8(),
        };
        let word = &rest[..end];
        if word.starts_with(['"', '\'']) {
            list.push(Token::Text(word[1..word.len() - 1].to_string()));
        } else if word.starts_with(|c: char| c.is_alphabetic() || c == '_') {
            list.push(Token::Path(word.to_string()));
        } else if !first.is_ascii_digit() {
            list.push(Token::Sign(first));
        }
        rest = rest[end..].trim_start();
    }
    list
}

/// Returns the insides of `{{ }}` and `{% %}`.
fn tags(text: &str) -> Vec<&str> {
    let mut list = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find('{') {
        let close = match rest[at + 1..].chars().next() {
            Some('{') => "}}",
            Some('%') => "%}",
            Some('#') => "#}",
            _ => {
                rest = &rest[at + 1..];
                continue;
            }
        };
        let inside = &rest[at + 2..];
        let end = inside.find(close).unwrap_or(inside.len());
        if close != "#}" {
            list.push(inside[..end].trim_start_matches('-').trim_end_matches('-'));
        }
        rest = inside.get(end + 2..).unwrap_or_default();
    }
    list
}

impl Reads {
    fn of(text: &str) -> Reads {
        let mut reads = Reads::default();
        for tag in tags(text) {
            reads.tag(&tokens(tag));
        }
        reads
    }

    fn tag(&mut self, tokens: &[Token]) {
        use Token::{Path, Sign, Text};
        if let [Path(word), Text(name)] = tokens
            && word == "include"
        {
            self.includes.push((name.clone(), self.binds.clone()));
            return;
        }
        let word = |at: Option<usize>| match at.and_then(|at| tokens.get(at)) {
            Some(Path(word)) => word.as_str(),
            _ => "",
        };
        let sign = |at: Option<usize>| match at.and_then(|at| tokens.get(at)) {
            Some(Sign(sign)) => *sign,
            _ => ' ',
        };
        let begins = word(Some(0));
        let is_set = matches!(begins, "set" | "set_global");
        let bound = match begins {
            "for" => tokens
                .iter()
                .position(|t| *t == Path("in".to_string()))
                .unwrap_or(0),
            _ if is_set => 2,
            _ => 0,
        };
        for (at, token) in tokens.iter().enumerate() {
            let Path(path) = token else { continue };
            let before = at.checked_sub(1);
            // A filter, a test, an argument's name, a function.
            let is_name = sign(before) == '|'
                || word(before) == "is"
                || word(before) == "not" && word(at.checked_sub(2)) == "is"
                || sign(Some(at + 1)) == '=' && sign(Some(at + 2)) != '='
                || sign(Some(at + 1)) == '(' && sign(before) != '|';
            if at < bound || is_name {
                continue;
            }
            self.read(path);
            let compares = sign(Some(at + 2)) == '=' && matches!(sign(Some(at + 1)), '=' | '!');
            if let (Some(field), true, Some(Text(text))) =
                (path.strip_prefix("g."), compares, tokens.get(at + 3))
            {
                self.compared.insert((field.to_string(), text.clone()));
            }
        }
        let names = tokens[..bound.min(tokens.len())].iter().skip(1);
        self.binds.extend(names.filter_map(|token| match token {
            Path(name) => Some(name.clone()),
            _ => None,
        }));
    }

    fn read(&mut self, path: &str) {
        let mut fields = path.split('.');
        let name = fields.next().unwrap_or_default();
        if LANGUAGE.contains(&name) || self.binds.contains(name) {
            return;
        }
        // Which entries there are depends on the kernel.
        let field = fields.next().filter(|_| name != "entry");
        let field = field.map(|field| format!("{name}.{field}"));
        self.wants.insert(field.unwrap_or_else(|| name.to_string()));
    }
}

fn all() -> BTreeMap<&'static str, Reads> {
    crate::templates()
        .map(|(name, text)| (name, Reads::of(text)))
        .collect()
}

/// Returns the list that a template begins with.
fn head(wants: &BTreeSet<String>) -> String {
    let mut head = "{#- wants:".to_string();
    let mut width = head.len();
    let words: Vec<&str> = wants.iter().map(String::as_str).collect();
    for (i, word) in words.iter().enumerate() {
        let comma = if i + 1 == words.len() { "" } else { "," };
        if width + word.len() + 6 > 100 {
            head += "\n   ";
            width = 3;
        }
        head += &format!(" {word}{comma}");
        width += word.len() + 2;
    }
    if words.is_empty() {
        head += " nothing";
    }
    head + " -#}\n"
}

#[test]
fn a_template_begins_with_what_it_wants() {
    let mut wrong = String::new();
    for (name, text) in crate::templates().collect::<BTreeMap<_, _>>() {
        let head = head(&Reads::of(text).wants);
        // One without the last dash keeps the empty line that follows it.
        let spaced = head.replace(" -#}", " #}");
        if !text.starts_with(&head) && !text.starts_with(&spaced) {
            wrong += &format!("templates/{name}.tera\n{head}");
        }
    }
    assert!(wrong.is_empty(), "these have to begin so:\n{wrong}");
}

/// Fields that exist for some kernels only.
const SOMETIMES: [&str; 2] = [
    "d.half",        // of GEMMs; the router has the same include and no halves
    "d.row_weights", // of rows for other ranks
];

/// Returns the names that a template and its includes read from outside, without those that are
/// bound before an include.
fn wanted(name: &str, all: &BTreeMap<&str, Reads>) -> BTreeSet<String> {
    let reads = &all[name];
    let mut wants = reads.wants.clone();
    for (part, bound) in &reads.includes {
        let of_part = wanted(part, all).into_iter();
        let root = |path: &String| path.split('.').next().unwrap_or_default().to_string();
        wants.extend(of_part.filter(|path| !bound.contains(&root(path))));
    }
    wants
}

const TARGETS: [&str; 14] = [
    "cpu:portable",
    "cpu:avx2",
    "cpu:avx512bf16",
    "cpu:amx",
    "cpu:neon",
    "cpu:neonbf16",
    "cuda:sm_75",
    "cuda:sm_80",
    "cuda:sm_90a",
    "rocm:gfx90a",
    "rocm:gfx942",
    "rocm:gfx950",
    "rocm:gfx1100",
    "sim:gfx942",
];

/// Returns a kernel, with its target, for each template that is no include.
fn kernels() -> BTreeMap<String, (KernelPlan, Target)> {
    let mut kernels = BTreeMap::new();
    for seed in 0..12 {
        for target in TARGETS.map(|target| target.parse().expect("a target")) {
            let training = PlanOptions::training(Training::default());
            for options in [PlanOptions::default(), training] {
                let plan = plan(&sample(seed), target, &options).expect("a plan");
                for kernel in plan.kernels {
                    let name = render::template(&kernel.op, target);
                    kernels.entry(name).or_insert((kernel, target));
                }
            }
        }
    }
    kernels
}

#[test]
fn what_templates_want_is_offered() {
    let all = all();
    let kernels = kernels();
    for stem in Stem::all() {
        let cpu = format!("{}/cpu/{stem}.c", stem.operator());
        assert!(
            stem == Stem::CommCast || kernels.contains_key(&cpu),
            "no kernel of {cpu}"
        );
    }
    let mut missing = BTreeSet::new();
    for (name, (kernel, target)) in &kernels {
        let offered = render::offered(kernel, *target, crate::Prelude::Native);
        for path in wanted(name, &all) {
            let (root, field) = path.split_once('.').unwrap_or((&path, ""));
            let value = offered.get(root);
            let found = match field {
                "" => value.is_some(),
                _ => value.is_some_and(|value| value.get_from_path(field).is_some()),
            };
            if !found && !SOMETIMES.contains(&path.as_str()) {
                missing.insert(format!("{name} wants {path}"));
            }
        }
    }
    assert!(missing.is_empty(), "nobody offers it:\n{missing:#?}");
}

#[test]
fn fields_are_compared_with_what_they_can_be() {
    for (name, reads) in all() {
        for (field, text) in reads.compared {
            assert!(
                gemm::can_be(&field, &text),
                "{name}: g.{field} is never {text}"
            );
        }
    }
}

#[test]
fn reads_are_found() {
    let text = "{#- no.tag -#}{% set a = d.x.y | join(sep=\"b\") %}{{ a }}{{ b[a] }}
        {%- for n in range(start=1, end=c.n + 1) %}{{ n ~ later }}{% endfor %}{% set later = 1 %}
        {% if d.z is starting_with(pat=\"q\") and g.s != \"t\" %}{% include \"p\" %}{% endif %}";
    let reads = Reads::of(text);
    let wants: Vec<&str> = reads.wants.iter().map(String::as_str).collect();
    assert_eq!(wants, ["b", "c.n", "d.x", "d.z", "g.s", "later"]);
    assert_eq!(reads.includes[0].0, "p");
    assert!(reads.includes[0].1.contains("later"));
    assert_eq!(
        reads.compared.first(),
        Some(&("s".to_string(), "t".to_string()))
    );
    assert_eq!(
        head(&reads.wants),
        "{#- wants: b, c.n, d.x, d.z, g.s, later -#}\n"
    );
}
