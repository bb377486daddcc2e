//! The doc comments of the structs of a spec.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use syn::{Attribute, Expr, Fields, Item, ItemEnum, ItemStruct, Lit, Meta, Type};

/// The files of the structs.
const FILES: [&str; 8] = [
    "types",
    "activation",
    "router_kind",
    "capacity",
    "around",
    "loss",
    "biases",
    "expression/mod",
];

/// Types whose words differ from their variants' names.
const BIASES: [(&str, &str); 4] = [
    ("None", "false"),
    ("Up", "\"up\""),
    ("Down", "\"down\""),
    ("All", "true"),
];

/// A value that a key may have.
pub struct Word {
    /// The value in TOML.
    pub name: String,
    /// Its meaning.
    pub meaning: String,
}

/// The structs and enums by name.
pub struct Docs {
    structs: BTreeMap<String, ItemStruct>,
    enums: BTreeMap<String, ItemEnum>,
}

impl Docs {
    /// Reads the sources in a folder.
    pub fn read(folder: &Path) -> Docs {
        let mut docs = Docs {
            structs: BTreeMap::new(),
            enums: BTreeMap::new(),
        };
        for file in FILES {
            let path = folder.join(format!("{file}.rs"));
            let text = fs::read_to_string(&path).expect("a source of the spec");
            for item in syn::parse_file(&text).expect("Rust").items {
                match item {
                    Item::Struct(item) => drop(docs.structs.insert(item.ident.to_string(), item)),
                    Item::Enum(item) => drop(docs.enums.insert(item.ident.to_string(), item)),
                    _ => {}
                }
            }
        }
        docs
    }

    /// Returns the field at the end of a path of keys.
    fn field(&self, path: &str) -> &syn::Field {
        let (mut table, mut found) = ("LayerSpec".to_string(), None);
        for name in path.split('.') {
            let fields = &self.structs[&table].fields;
            let field = fields
                .iter()
                .find(|field| field.ident.as_ref().is_some_and(|i| i == name));
            let field = field.unwrap_or_else(|| panic!("{table} has no {name}"));
            table = inner(&field.ty);
            found = Some(field);
        }
        found.expect("a path has a key")
    }

    /// Returns true if a table may be left out and then has no effect.
    pub fn is_optional(&self, path: &str) -> bool {
        let of = &self.field(path).ty;
        is_option(of) || is_list(of)
    }

    /// Returns the purpose of a table.
    pub fn of_table(&self, path: &str) -> String {
        let name = match path {
            "" => "LayerSpec".to_string(),
            path => inner(&self.field(path).ty),
        };
        text(&self.structs[&name].attrs)
    }

    /// Returns the meaning of a key.
    pub fn of_key(&self, path: &str) -> String {
        text(&self.field(path).attrs)
    }

    /// Returns the default of a key in a table of a list, which the plainest spec does not have.
    pub fn default(&self, path: &str) -> Option<String> {
        let field = self.field(path);
        let attributes: Vec<String> = field.attrs.iter().map(tokens).collect();
        if !attributes
            .iter()
            .any(|text| text.starts_with("serde (default"))
        {
            return None;
        }
        let name = inner(&field.ty);
        match name.as_str() {
            _ if is_option(&field.ty) => None,
            "bool" => Some("false".to_string()),
            "f64" => Some("0.0".to_string()),
            name => {
                let words = &self.enums.get(name)?.variants;
                let word = words
                    .iter()
                    .find(|v| v.attrs.iter().any(|a| tokens(a) == "default"))?;
                Some(format!("\"{}\"", kebab(&word.ident.to_string())))
            }
        }
    }

    /// Returns the values of a key that has a few, in the order of its enum.
    pub fn words(&self, path: &str) -> Vec<Word> {
        let name = inner(&self.field(path).ty);
        let Some(item) = self.enums.get(&name) else {
            return Vec::new();
        };
        let word = |variant: &syn::Variant| Word {
            name: spelled(&name, variant),
            meaning: text(&variant.attrs),
        };
        item.variants.iter().map(word).collect()
    }
}

/// Returns a variant in its TOML spelling.
fn spelled(of: &str, variant: &syn::Variant) -> String {
    let name = variant.ident.to_string();
    if of == "Biases" {
        let known = BIASES.iter().find(|(variant, _)| *variant == name);
        return known.expect("a bias").1.to_string();
    }
    let renamed = variant.attrs.iter().map(tokens).find_map(|text| {
        let (_, rest) = text.split_once("rename = \"")?;
        Some(rest.split('"').next().unwrap_or_default().to_string())
    });
    let word = renamed.unwrap_or_else(|| kebab(&name));
    match &variant.fields {
        Fields::Unit => format!("\"{word}\""),
        _ => format!("{{ {word} = … }}"),
    }
}

/// Turns `SqrtSoftplus` into `sqrt-softplus`.
fn kebab(name: &str) -> String {
    let mut word = String::new();
    for letter in name.chars() {
        if letter.is_uppercase() && !word.is_empty() {
            word.push('-');
        }
        word.extend(letter.to_lowercase());
    }
    word
}

/// Returns the text of an attribute, such as `serde (default)`.
fn tokens(attribute: &Attribute) -> String {
    match &attribute.meta {
        Meta::Path(path) => path
            .get_ident()
            .map(ToString::to_string)
            .unwrap_or_default(),
        Meta::List(list) => {
            let name = list.path.get_ident().map(ToString::to_string);
            format!("{} ({})", name.unwrap_or_default(), list.tokens)
        }
        Meta::NameValue(_) => String::new(),
    }
}

/// Returns a doc comment as one paragraph.
fn text(attributes: &[Attribute]) -> String {
    let lines = attributes
        .iter()
        .filter_map(|attribute| match &attribute.meta {
            Meta::NameValue(pair) if pair.path.is_ident("doc") => match &pair.value {
                Expr::Lit(lit) => match &lit.lit {
                    Lit::Str(line) => Some(line.value().trim().to_string()),
                    _ => None,
                },
                _ => None,
            },
            _ => None,
        });
    lines.collect::<Vec<_>>().join(" ").trim().to_string()
}

fn is_option(of: &Type) -> bool {
    matches!(of, Type::Path(path) if path.path.segments.last().is_some_and(|s| s.ident == "Option"))
}

fn is_list(of: &Type) -> bool {
    matches!(of, Type::Path(path) if path.path.segments.last().is_some_and(|s| s.ident == "Vec"))
}

/// Returns the name of a type without `Option` or `Vec`.
fn inner(of: &Type) -> String {
    let Type::Path(path) = of else {
        panic!("a key is of a named type");
    };
    let last = path.path.segments.last().expect("a name");
    match &last.arguments {
        syn::PathArguments::AngleBracketed(list) => match list.args.first() {
            Some(syn::GenericArgument::Type(of)) => inner(of),
            _ => panic!("{} has no type inside", last.ident),
        },
        _ => last.ident.to_string(),
    }
}
