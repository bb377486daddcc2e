//! Plan, resources and launch geometry.

use super::super::model::{Inspection, Launch};
use super::super::text::{compile_time, grid, grid_formula, registers, role_name};
use super::escape;
use moesaic::plan::Role;

/// The launches in order, with the tensors that flow through them.
pub fn plan(inspection: &Inspection) -> String {
    let steps: String = inspection
        .launches
        .iter()
        .map(|launch| step(inspection, launch))
        .collect();
    let key: String = [Role::Input, Role::Weight, Role::Scratch, Role::Output]
        .map(|role| {
            format!(
                "<span class=\"chip {0}\"><code>{0}</code></span>",
                role_name(role)
            )
        })
        .concat();
    format!(
        "<h2 id=\"plan\">Plan</h2><p>The launches of a forward pass, in order. \
         <code>T</code> is the number of tokens of a call; nothing is specialised by it.</p>\
         <ol class=\"card steps\">{steps}</ol><div class=\"key\">{key}</div>\n"
    )
}

fn step(inspection: &Inspection, launch: &Launch) -> String {
    let kernel = &inspection.kernels[launch.kernel].source;
    let chips = |names: Vec<&str>| {
        names
            .iter()
            .map(|name| chip(inspection, name))
            .collect::<Vec<_>>()
            .join("")
    };
    format!(
        "<li class=\"{stem}\"><span class=\"number\">{number}</span>\
         <div class=\"what\"><a href=\"#kernel-{kernel}\"><b>{symbol}</b></a><span>{summary}</span></div>\
         <div class=\"flow\">{reads}<span class=\"arrow\">→</span>{writes}</div></li>",
        stem = kernel.stem,
        number = launch.number,
        kernel = escape(&kernel.name),
        symbol = escape(&launch.label),
        summary = escape(&inspection.entry(launch).summary),
        reads = chips(inspection.reads(launch)),
        writes = chips(inspection.writes(launch)),
    )
}

fn chip(inspection: &Inspection, name: &str) -> String {
    let Some(tensor) = inspection.plan.tensor(name) else {
        return String::new();
    };
    let sizes: Vec<String> = tensor
        .shape
        .iter()
        .map(|size| escape(&size.to_string()))
        .collect();
    format!(
        "<span class=\"chip {role}\" title=\"{role}\"><code>{name}</code><i>{dtype} {sizes}</i></span>",
        role = role_name(tensor.role),
        name = escape(name),
        dtype = tensor.dtype,
        sizes = sizes.join(" × "),
    )
}

/// What the binaries say.
pub fn resources(inspection: &Inspection) -> String {
    let rows: String = inspection
        .launches
        .iter()
        .map(|launch| resource(inspection, launch))
        .collect();
    let compilers: Vec<&str> = inspection
        .kernels
        .iter()
        .filter_map(|kernel| Some(kernel.artifact.as_ref()?.report.compiler.as_str()))
        .collect();
    let by = compilers.first().map_or(String::new(), |name| {
        format!(" Compiled by {}.", escape(name))
    });
    format!(
        "<h2 id=\"resources\">Resources</h2><p>Read from the binaries.{by} A dash is a fact that \
         this kind of binary does not hold.</p><div class=\"card\"><table><thead><tr>\
         <th>Entry</th><th class=\"n\">Registers</th><th class=\"n\">Spills</th><th class=\"n\">Stack</th>\
         <th class=\"n\">Shared memory</th><th class=\"n\">Code</th><th class=\"n\">Parameters</th>\
         <th class=\"n\">Compile</th><th>Cache</th></tr></thead><tbody>{rows}</tbody></table></div>\n"
    )
}

fn resource(inspection: &Inspection, launch: &Launch) -> String {
    let kernel = &inspection.kernels[launch.kernel];
    let report = inspection.report(launch);
    let number = |n: Option<u64>, unit: &str| n.map_or("–".to_string(), |n| format!("{n}{unit}"));
    let spills = report.and_then(|r| r.spill_bytes);
    let spill_class = match spills {
        Some(0) => "n good",
        Some(_) => "n bad",
        None => "n",
    };
    let dynamic = inspection.entry(launch).launch.shared_bytes;
    let shared = report
        .and_then(|r| r.shared_bytes)
        .map(|n| u64::from(n + dynamic));
    let state = match (&kernel.problem, &kernel.artifact) {
        (Some(_), _) => "<span class=\"bad\">failed</span>",
        (None, Some(_)) if kernel.cached => "<span class=\"tag\">hit</span>",
        (None, Some(_)) => "<span class=\"tag\">compiled</span>",
        (None, None) => "–",
    };
    format!(
        "<tr class=\"{}\"><td><span class=\"dot\"></span><code>{}</code></td><td class=\"n\">{}</td>\
         <td class=\"{spill_class}\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td>\
         <td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td>{state}</td></tr>",
        kernel.source.stem,
        escape(&launch.label),
        registers(report).replace('-', "–"),
        number(spills.map(u64::from), " B"),
        number(report.and_then(|r| r.stack_bytes).map(u64::from), " B"),
        number(shared, " B"),
        number(report.and_then(|r| r.code_bytes), " B"),
        inspection.entry(launch).params.len(),
        compile_time(kernel),
    )
}

/// Blocks and threads.
pub fn geometry(inspection: &Inspection) -> String {
    let counts = inspection.tokens.iter();
    let counts: String = counts
        .map(|t| format!("<th class=\"n\">T = {t}</th>"))
        .collect();
    let rows: String = inspection
        .launches
        .iter()
        .map(|launch| launch_row(inspection, launch))
        .collect();
    format!(
        "<h2 id=\"launches\">Launches</h2><p>Blocks of the grid as a formula over the tokens, and at \
         the token counts asked for.</p><div class=\"card\"><table><thead><tr><th>Entry</th>\
         <th>Grid</th><th class=\"n\">Threads</th><th class=\"n\">Dynamic shared</th>{counts}\
         </tr></thead><tbody>{rows}</tbody></table></div>\n"
    )
}

fn launch_row(inspection: &Inspection, launch: &Launch) -> String {
    let geometry = &inspection.entry(launch).launch;
    let cells: String = launch
        .at
        .iter()
        .map(|at| format!("<td class=\"n\">{}</td>", grid(at).replace('x', "×")))
        .collect();
    format!(
        "<tr class=\"{}\"><td><span class=\"dot\"></span><code>{}</code></td><td><code>{}</code></td>\
         <td class=\"n\">{}</td><td class=\"n\">{} B</td>{cells}</tr>",
        inspection.kernels[launch.kernel].source.stem,
        escape(&launch.label),
        escape(&grid_formula(geometry).replace(" x ", " × ")),
        geometry.threads,
        geometry.shared_bytes,
    )
}
