//! An inspection as one self-contained page.
//!
//! The page loads nothing from outside: style and drawing are inline, and the only scripts switch
//! between light and dark and between token counts.

mod highlight;
mod kernels;
mod launches;
mod origin;
mod roofline;
mod sections;

use super::model::Inspection;
use super::text::{roofs, router};
use crate::units;
use moesaic::plan::{LayerPlan, TensorRole};

/// Renders the whole page.
pub fn render(inspection: &Inspection, asm: Option<&[String]>) -> String {
    let spec = &inspection.plan.spec;
    let title = escape(&format!("{} on {}", spec.name, inspection.target));
    let roof = inspection
        .machine
        .as_ref()
        .map_or(String::new(), |m| roofline::section(inspection, m));
    let body = [
        header(inspection),
        facts(inspection),
        trouble(inspection),
        slider(inspection),
        roof,
        launches::section(inspection),
        sections::plan(inspection),
        sections::resources(inspection),
        inspection
            .counted
            .as_ref()
            .map_or(String::new(), sections::counted),
        kernels::section(inspection, asm),
        origin::section(inspection),
    ];
    document(&title, &navigation(inspection), &body.concat())
}

/// Returns a whole page of a title, the links of its navigation and its contents.
pub fn document(title: &str, links: &str, body: &str) -> String {
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>{title}</title>\n<style>\n{}</style>\n</head>\n<body>\n<div class=\"page\">\n\
         <nav><p class=\"brand\">moesaic <button title=\"light or dark\" onclick=\"{TOGGLE}\">◐\
         </button></p>{links}</nav>\n<main>\n{body}</main>\n</div>\n</body>\n</html>\n",
        include_str!("style.css"),
    )
}

/// Escapes text for use between tags and in attributes.
pub fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => safe += "&amp;",
            '<' => safe += "&lt;",
            '>' => safe += "&gt;",
            '"' => safe += "&quot;",
            '\'' => safe += "&#39;",
            c => safe.push(c),
        }
    }
    safe
}

fn navigation(inspection: &Inspection) -> String {
    let kernels: String = inspection
        .kernels
        .iter()
        .map(|kernel| {
            let name = escape(&kernel.label(&kernel.source.name));
            format!(
                "<a class=\"{}\" href=\"#{}\">{name}</a>",
                kernel.source.stem,
                escape(&kernel.anchor())
            )
        })
        .collect();
    let roof = match inspection.machine {
        Some(_) => "<a href=\"#roofline\">Roofline</a>",
        None => "",
    };
    let counted = match inspection.counted {
        Some(_) => "<a href=\"#counted\">Counted</a>",
        None => "",
    };
    format!(
        "{roof}<a href=\"#launches\">Launches</a><a href=\"#workspace\">Workspace</a>\
         <a href=\"#plan\">Plan</a><a href=\"#resources\">Resources</a>{counted}\
         <a href=\"#origin\">Origin</a><h4>Kernels</h4><div class=\"sub\">{kernels}</div>"
    )
}

const TOGGLE: &str = "let r=document.documentElement,\
    d=r.dataset.theme||(matchMedia('(prefers-color-scheme:dark)').matches?'dark':'light');\
    r.dataset.theme=d=='dark'?'light':'dark'";

fn header(inspection: &Inspection) -> String {
    let spec = &inspection.plan.spec;
    let roof = inspection.machine.as_ref();
    let roof = roof.map_or(String::new(), |machine| {
        format!(" Limits: {}.", roofs(machine))
    });
    format!(
        "<header><h1>{} <span class=\"on\">on {}</span></h1><p>Router: {}.{}</p></header>\n",
        escape(&spec.name),
        inspection.target,
        escape(&router(spec)),
        escape(&roof)
    )
}

fn facts(inspection: &Inspection) -> String {
    let mut list = sizes(&inspection.plan);
    let kernels = units::count(inspection.kernels.len(), "kernel");
    list.push((binaries(inspection), format!("binaries of {kernels}")));
    let last = inspection.tokens.iter().enumerate().next_back();
    let roofline = last.and_then(|(i, tokens)| Some((tokens, inspection.total(i).1?)));
    if let Some((tokens, seconds)) = roofline {
        let name = format!("roofline for {}", units::count(*tokens as usize, "token"));
        list.push((units::seconds(seconds), name));
    }
    let card = |(value, name): &(String, String)| {
        let (value, name) = (escape(value), escape(name));
        format!("<div class=\"fact\"><b>{value}</b><span>{name}</span></div>")
    };
    let cards: String = list.iter().map(card).collect();
    format!("<div class=\"facts\">{cards}</div>\n")
}

/// Returns the sizes of the layer with their names.
fn sizes(plan: &LayerPlan) -> Vec<(String, String)> {
    let (spec, shape) = (&plan.spec, &plan.spec.shape);
    let weights = plan
        .tensors
        .iter()
        .filter(|tensor| tensor.role == TensorRole::Weight);
    let bytes = weights.map(|tensor| tensor.bytes(0)).sum();
    let experts = spec.routed_experts();
    let experts = match spec.shared.len() {
        0 => (experts.to_string(), "experts"),
        n => (format!("{experts} + {n}"), "routed and shared experts"),
    };
    let widths = match spec.output_dim() {
        output if output == shape.model_dim => format!("{output} → {}", shape.hidden_dim),
        output => format!("{} → {} → {output}", shape.model_dim, shape.hidden_dim),
    };
    let types = &spec.precision;
    let types = format!(
        "{} weights, {} activations",
        types.weights, types.activations
    );
    vec![
        (experts.0, experts.1.to_string()),
        (shape.top_k.to_string(), "experts per token".to_string()),
        (widths, "model and hidden width".to_string()),
        (units::bytes(bytes), types),
    ]
}

fn binaries(inspection: &Inspection) -> String {
    let artifacts = inspection
        .kernels
        .iter()
        .filter_map(|kernel| kernel.artifact.as_ref());
    let bytes: usize = artifacts.map(|artifact| artifact.binary.len()).sum();
    match bytes {
        0 => "–".to_string(),
        bytes => units::bytes(bytes as u64),
    }
}

fn trouble(inspection: &Inspection) -> String {
    let problems = inspection
        .kernels
        .iter()
        .filter_map(|kernel| kernel.problem.as_ref());
    let all = inspection.trouble.iter().chain(problems);
    all.map(|text| format!("<div class=\"card warning\">{}</div>\n", escape(text)))
        .collect()
}

/// Returns the attribute of what belongs to one token count. Without a script the page shows the
/// last one.
pub fn at(inspection: &Inspection, count: usize) -> String {
    let last = count + 1 == inspection.tokens.len();
    format!(
        "data-t=\"{count}\"{}",
        if last { "" } else { " class=\"off\"" }
    )
}

/// Renders the slider that picks one of the token counts.
fn slider(inspection: &Inspection) -> String {
    let last = inspection.tokens.len().saturating_sub(1);
    let (Some(tokens), false) = (inspection.tokens.last(), last == 0) else {
        return String::new();
    };
    let ticks: Vec<String> = inspection.tokens.iter().map(u64::to_string).collect();
    format!(
        "<div class=\"slider\"><label>T = <output id=\"t\">{tokens}</output> tokens \
         <input type=\"range\" min=\"0\" max=\"{last}\" value=\"{last}\" aria-label=\"tokens of a \
         call\" data-tokens=\"{}\" oninput=\"{PICK}\"></label></div>\n",
        ticks.join(" ")
    )
}

const PICK: &str = "document.querySelectorAll('[data-t]').forEach(e=>e.classList.toggle('off',\
    e.dataset.t!=this.value));document.getElementById('t').value=\
    this.dataset.tokens.split(' ')[this.value]";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inspect::text::role_name;
    use moesaic::kernel::Stem;

    /// Everything with a colour of its own has a rule.
    #[test]
    fn every_chip_and_every_stem_has_a_style() {
        let style = include_str!("style.css");
        let roles = TensorRole::ALL.iter().map(|role| role_name(*role));
        let classes = roles.flat_map(|name| name.split(' ').filter(|word| *word != "gradient"));
        for class in classes {
            let rule = format!(".{class} {{ --role:");
            assert!(style.contains(&rule), "no {rule} }}");
        }
        for stem in Stem::all() {
            let rule = format!(".{stem} {{ --stem:");
            assert!(style.contains(&rule), "no {rule} }}");
        }
    }

    #[test]
    fn nothing_breaks_out_of_the_page() {
        assert_eq!(
            escape("<a href=\"x\">&'</a>"),
            "&lt;a href=&quot;x&quot;&gt;&amp;&#39;&lt;/a&gt;"
        );
    }
}
