//! Parameter lists in the target's language.

use moesaic_kernel::{Access, Entry, Language, Param, ParamType, Scalar};
use serde::Serialize;

/// An entry, as a template sees it.
#[derive(Serialize)]
pub struct EntryText {
    /// The symbol.
    symbol: String,
    /// The action of one launch.
    summary: String,
    /// Threads per block.
    threads: u32,
    /// The parameter list, one per line, with shapes as comments.
    params: String,
    /// The parameter names, as the arguments of a call indented by four.
    args: String,
    /// C only: the exported function that unpacks arguments and runs blocks.
    pub export: String,
}

impl EntryText {
    /// Returns the texts of `entry`. `overlaps` is whether launches of the kernel may begin before
    /// earlier launches have ended.
    pub fn new(entry: &Entry, language: Language, overlaps: bool) -> EntryText {
        EntryText {
            symbol: entry.symbol.clone(),
            summary: entry.summary.clone(),
            threads: entry.launch.threads,
            params: params(&entry.params, language, pointer(language, overlaps)),
            args: args(entry),
            export: if language == Language::C {
                export(entry)
            } else {
                String::new()
            },
        }
    }
}

/// Returns the declaration of a pointer. Where launches overlap it has no `__restrict__`, because
/// the compiler takes memory behind a `__restrict__` pointer for constant and would read it before
/// the kernel waits for its writer.
fn pointer(language: Language, overlaps: bool) -> &'static str {
    match language {
        Language::C => "*restrict ",
        _ if overlaps => "*",
        _ => "*__restrict__ ",
    }
}

fn params(params: &[Param], language: Language, pointer: &str) -> String {
    let declarations: Vec<String> = params.iter().map(|p| declaration(p, pointer)).collect();
    let width = declarations.iter().map(String::len).max().unwrap_or(0) + 1;
    let last = params.len() - 1;
    let lines = params
        .iter()
        .zip(&declarations)
        .enumerate()
        .map(|(i, (param, text))| {
            // A block function of the C family has its block index after these.
            let comma = if i == last && language != Language::C {
                ""
            } else {
                ","
            };
            match param.shape.as_str() {
                "" => format!("    {text}{comma}"),
                shape => format!("    {:<width$} // {shape}", format!("{text}{comma}")),
            }
        });
    lines.collect::<Vec<_>>().join("\n")
}

/// Returns `const f32 *restrict logits`.
fn declaration(param: &Param, pointer: &str) -> String {
    match param.ty {
        ParamType::Tensor(dtype, access) => {
            let constness = if access == Access::Read { "const " } else { "" };
            format!("{constness}{dtype} {pointer}{}", param.name)
        }
        ParamType::Scalar(scalar) => format!("{} {}", scalar_name(scalar), param.name),
        ParamType::TensorMap(_) => format!("const __grid_constant__ TensorMap {}", param.name),
    }
}

fn scalar_name(scalar: Scalar) -> &'static str {
    match scalar {
        Scalar::I64 => "i64",
        Scalar::F32 => "f32",
    }
}

/// Returns the exported function of a C entry. `args[i]` points to the value of argument i. The
/// function runs blocks `first..last` of a grid that is `grid_x` wide. An entry with shared memory
/// gets memory of the thread, which begins with a line of zeros.
fn export(entry: &Entry) -> String {
    let symbol = &entry.symbol;
    let unpack: String = entry
        .params
        .iter()
        .enumerate()
        .map(|(i, p)| unpack(i, p))
        .collect();
    let mut names: Vec<&str> = entry.params.iter().map(|p| p.name.as_str()).collect();
    names.extend(["block % grid_x", "block / grid_x"]);
    let mut scratch = "";
    if entry.launch.shared_bytes > 0 {
        names.push("scratch");
        scratch = ", void *scratch";
    }
    let call = wrap(&format!("        {symbol}_block("), &names);
    format!(
        "EXPORT void {symbol}(void *const *args, i64 first, i64 last, i64 grid_x{scratch})\n{{\n{unpack}\
         \x20   for (i64 block = first; block < last; block++)\n{call}\n}}\n"
    )
}

/// Returns the arguments of a call with the names of its parameters, broken into lines.
fn args(entry: &Entry) -> String {
    let names: Vec<&str> = entry.params.iter().map(|p| p.name.as_str()).collect();
    let head = " ".repeat("    scan::(".len() + entry.symbol.len());
    let call = wrap(&head, &names);
    call.trim_start().trim_end_matches(");").to_string()
}

fn unpack(index: usize, param: &Param) -> String {
    let name = &param.name;
    match param.ty {
        ParamType::Tensor(dtype, access) => {
            let constness = if access == Access::Read { "const " } else { "" };
            format!(
                "    {constness}{dtype} *{name} = *({constness}{dtype} *const *)args[{index}];\n"
            )
        }
        ParamType::Scalar(scalar) => {
            let ty = scalar_name(scalar);
            format!("    {ty} {name} = *(const {ty} *)args[{index}];\n")
        }
        // No C kernel has one: only TMA reads tensor maps.
        ParamType::TensorMap(_) => String::new(),
    }
}

/// Returns a call over several lines of at most 96 columns.
fn wrap(head: &str, names: &[&str]) -> String {
    let indent = " ".repeat(12);
    let mut text = head.to_string();
    let mut column = head.len();
    for name in names {
        if column + name.len() + 2 > 96 {
            text.truncate(text.trim_end().len());
            text += &format!("\n{indent}");
            column = indent.len();
        }
        text += &format!("{name}, ");
        column += name.len() + 2;
    }
    text.truncate(text.len() - 2);
    text + ");"
}
