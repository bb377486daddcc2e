//! The sections on plan, resources and launch geometry.

use super::super::counted::{Counted, TITLES};
use super::super::model::{Inspection, Kernel, Launch};
use super::super::text::{compile_time, grid, grid_formula, registers, role_name, spills};
use super::escape;
use moesaic::plan::Role;
use moesaic::target::KernelReport;

/// Renders the launches in order, with the tensors that flow through them.
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

/// Titles of the columns with facts of a binary.
const FACTS: [&str; 7] = [
    "Registers",
    "Spills",
    "Stack",
    "Shared memory",
    "Code",
    "Parameters",
    "Compile",
];

/// Renders the facts of the binaries, without the columns that this kind of binary does not report.
pub fn resources(inspection: &Inspection) -> String {
    let facts: Vec<[String; 7]> = inspection
        .launched()
        .map(|(launch, kernel)| facts(launch, kernel))
        .collect();
    let known = |i: &usize| facts.iter().any(|facts| facts[*i] != "–");
    let columns: Vec<usize> = (0..FACTS.len()).filter(known).collect();
    let titles: String = columns
        .iter()
        .map(|&i| format!("<th class=\"n\">{}</th>", FACTS[i]))
        .collect();
    let rows = inspection.launched().zip(&facts);
    let rows: String = rows
        .map(|((launch, kernel), facts)| resource(launch, kernel, facts, &columns))
        .collect();
    let mut artifacts = inspection
        .kernels
        .iter()
        .filter_map(|kernel| kernel.artifact.as_ref());
    let by = artifacts.next().map_or(String::new(), |a| {
        format!(" Compiled by {}.", escape(&a.report.compiler))
    });
    format!(
        "<h2 id=\"resources\">Resources</h2><p>Read from the binaries.{by}</p>\
         <div class=\"card\"><table><thead><tr><th>Entry</th>{titles}<th>Cache</th></tr></thead>\
         <tbody>{rows}</tbody></table></div>\n"
    )
}

fn facts(launch: &Launch, kernel: &Kernel) -> [String; 7] {
    let (report, entry) = (kernel.report(launch), kernel.entry(launch));
    let bytes = |n: Option<u64>| n.map_or("–".to_string(), |n| format!("{n} B"));
    let of = |fact: fn(&KernelReport) -> Option<u32>| report.and_then(fact).map(u64::from);
    let shared = of(|r| r.shared_bytes).map(|n| n + u64::from(entry.launch.shared_bytes));
    [
        registers(report).replace('-', "–"),
        spills(report).replace('-', "–"),
        bytes(of(|r| r.stack_bytes)),
        bytes(shared),
        bytes(report.and_then(|r| r.code_bytes)),
        entry.params.len().to_string(),
        compile_time(kernel).replace('-', "–"),
    ]
}

fn resource(launch: &Launch, kernel: &Kernel, facts: &[String; 7], columns: &[usize]) -> String {
    let class = |i: usize| match (FACTS[i], facts[i].as_str()) {
        ("Spills", "0") => "n good",
        ("Spills", spills) if spills != "–" => "n bad",
        _ => "n",
    };
    let cells: String = columns
        .iter()
        .map(|&i| format!("<td class=\"{}\">{}</td>", class(i), escape(&facts[i])))
        .collect();
    let state = match (&kernel.problem, &kernel.artifact) {
        (Some(_), _) => "<span class=\"bad\">failed</span>",
        (None, Some(_)) if kernel.cached => "<span class=\"tag\">hit</span>",
        (None, Some(_)) => "<span class=\"tag\">compiled</span>",
        (None, None) => "–",
    };
    format!(
        "<tr class=\"{}\"><td><span class=\"dot\"></span><code>{}</code></td>{cells}<td>{state}</td></tr>",
        kernel.source.stem,
        escape(&kernel.label(&launch.label)),
    )
}

/// Renders the blocks and threads of the launches.
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

/// Renders the counts of a simulator.
pub fn counted(counted: &Counted) -> String {
    let titles: String = TITLES.iter().map(|title| heading(title)).collect();
    let rows: String = counted
        .rows()
        .iter()
        .map(|[symbol, numbers @ ..]| {
            let cells = numbers.iter();
            let cells: String = cells
                .map(|text| format!("<td class=\"n\">{text}</td>"))
                .collect();
            format!("<tr><td><code>{}</code></td>{cells}</tr>", escape(symbol))
        })
        .collect();
    format!(
        "<h2 id=\"counted\">Counted</h2><p>What the kernels did on {} at {} random tokens: \
         facts of the program, no times.</p><div class=\"card\"><table><thead><tr>{titles}</tr>\
         </thead><tbody>{rows}</tbody></table></div>\n",
        counted.target, counted.tokens
    )
}

/// Renders a title such as `>BANK CONFLICTS` as the heading of a column of numbers.
fn heading(title: &str) -> String {
    let words = |title: &str| match title.split_at_checked(1) {
        Some((first, rest)) => format!("{first}{}", rest.to_lowercase().replace("flop", "FLOP")),
        None => String::new(),
    };
    match title.strip_prefix('>') {
        Some(title) => format!("<th class=\"n\">{}</th>", words(title)),
        None => format!("<th>{}</th>", words(title)),
    }
}
