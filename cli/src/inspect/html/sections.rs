//! The sections on plan, resources and launch geometry.

use super::super::counted::{Counted, TITLES};
use super::super::model::{InspectedKernel, InspectedLaunch, Inspection};
use super::super::text::{compile_time, registers, role_name, spills};
use super::escape;
use crate::occupancy::Unit;
use moesaic::Target;
use moesaic::plan::TensorRole;
use moesaic::target::KernelReport;

/// Renders the launches in order, with the tensors that flow through them: one list for calls of
/// few tokens and one for calls of many, if other kernels run there.
pub fn plan(inspection: &Inspection) -> String {
    let key: String = TensorRole::ALL
        .iter()
        .filter(|role| inspection.plan.tensors.iter().any(|t| t.role == **role))
        .map(|role| {
            let name = role_name(*role);
            format!("<span class=\"chip {name}\"><code>{name}</code></span>")
        })
        .collect();
    let lists = match last_of_few(inspection) {
        None => steps(inspection, |_| true),
        Some(few) => format!(
            "<h3>Decode: calls of up to {few} tokens</h3>{}<h3>Prefill: calls of more than {few} \
             tokens</h3>{}",
            steps(inspection, |launch| blocks(inspection, launch, few) > 0),
            steps(inspection, |launch| blocks(inspection, launch, few + 1) > 0),
        ),
    };
    let pass = match inspection.plan.training {
        None => "forward pass",
        Some(_) => "forward and a backward pass",
    };
    format!(
        "<h2 id=\"plan\">Plan</h2><p>The launches of a {pass}, in order. <code>T</code> is the \
         number of tokens of a call: one binary of a kernel serves every T that it is for, and its \
         grid follows from T.</p>{lists}<div class=\"key\">{key}</div>\n"
    )
}

/// Renders the launches that `runs` accepts.
fn steps(inspection: &Inspection, runs: impl Fn(&InspectedLaunch) -> bool) -> String {
    let launches = inspection.launches.iter().filter(|launch| runs(launch));
    let steps: String = launches.map(|launch| step(inspection, launch)).collect();
    format!("<ol class=\"card steps\">{steps}</ol>")
}

fn blocks(inspection: &Inspection, launch: &InspectedLaunch, tokens: u64) -> u64 {
    inspection.entry(launch).launch.blocks(tokens)
}

/// Returns the largest number of tokens for which decode kernels run, if the layer has some.
fn last_of_few(inspection: &Inspection) -> Option<u64> {
    let launches = inspection.launches.iter();
    let mut decode = launches.filter(|launch| {
        blocks(inspection, launch, 1) > 0 && blocks(inspection, launch, MANY) == 0
    });
    let first = decode.next()?;
    (1..MANY).find(|&tokens| blocks(inspection, first, tokens + 1) == 0)
}

/// A number of tokens that no decode kernel serves.
const MANY: u64 = 1 << 16;

fn step(inspection: &Inspection, launch: &InspectedLaunch) -> String {
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
        .map(|(launch, kernel)| facts(inspection.target, launch, kernel))
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
        "<h2 id=\"resources\">Resources</h2><p>Read from the binaries; shared memory beside the most that a block may have.{by}</p>\
         <div class=\"card\"><table><thead><tr><th>Entry</th>{titles}<th>Cache</th></tr></thead>\
         <tbody>{rows}</tbody></table></div>\n"
    )
}

fn facts(target: Target, launch: &InspectedLaunch, kernel: &InspectedKernel) -> [String; 7] {
    let (report, entry) = (kernel.report(launch), kernel.entry(launch));
    let bytes = |n: Option<u64>| n.map_or("–".to_string(), |n| format!("{n} B"));
    let of = |fact: fn(&KernelReport) -> Option<u32>| report.and_then(fact).map(u64::from);
    let shared = of(|r| r.shared_bytes).map(|n| n + u64::from(entry.launch.shared_bytes));
    let shared = match (shared, Unit::of(target)) {
        (Some(bytes), Some(unit)) => format!("{bytes} of {} B", unit.block_shared),
        (shared, _) => bytes(shared),
    };
    [
        registers(report).replace('-', "–"),
        spills(report).replace('-', "–"),
        bytes(of(|r| r.stack_bytes)),
        shared,
        bytes(report.and_then(|r| r.code_bytes)),
        entry.params.len().to_string(),
        compile_time(kernel).replace('-', "–"),
    ]
}

fn resource(
    launch: &InspectedLaunch,
    kernel: &InspectedKernel,
    facts: &[String; 7],
    columns: &[usize],
) -> String {
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
