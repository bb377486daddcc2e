//! The plan of a model as one self-contained page, in the style of `inspect --html`.

use super::model_report::{ModelReport, flops, parts};
use crate::inspect::html::{document, escape};
use crate::units;
use moesaic::planner::Simulated;
use moesaic::planner::model::{ModelPrediction, StepPhase};
use std::fmt::Write;

/// Renders the whole page.
pub fn render(report: &ModelReport, timeline: &[Simulated]) -> String {
    let title = format!(
        "{} ranks of {}",
        report.scenario.world, report.scenario.machine.name
    );
    let mut links = vec!["ranked", "step", "memory", "timeline"];
    if report.compared.is_some() {
        links.insert(3, "compared");
    }
    let link = |name: &&str| {
        format!(
            "<a href=\"#{name}\">{}{}</a>",
            name[..1].to_uppercase(),
            &name[1..]
        )
    };
    let links: String = links.iter().map(link).collect();
    let body = [
        header(report),
        facts(report),
        ranked(report),
        step(report),
        memory(report),
        compared(report),
        stages(report, timeline),
    ];
    document(&escape(&title), &links, &body.concat())
}

fn header(report: &ModelReport) -> String {
    let machine = &report.scenario.machine;
    format!(
        "<header><h1>{} ranks <span class=\"on\">of {}</span></h1><p>{}. {}. {}. Simulated and \
         counted, not measured.</p></header>\n",
        report.scenario.world,
        escape(&machine.name),
        escape(&machine.about),
        escape(&report.model()),
        escape(&report.batch())
    )
}

fn facts(report: &ModelReport) -> String {
    let best = report.best;
    let facts = [
        (units::seconds(best.seconds), "a step of the first"),
        (best.mesh.to_string(), "its mesh"),
        (
            format!("{:.0}", best.tokens_per_second),
            "tokens/s of a rank",
        ),
        (flops(best), "TFLOP/s of a rank, and of its peak"),
        (units::bytes(best.memory.bytes() as u64), "memory of a rank"),
    ];
    let card = |(value, name): &(String, &str)| {
        let value = escape(value);
        format!("<div class=\"fact\"><b>{value}</b><span>{name}</span></div>")
    };
    let cards: String = facts.iter().map(card).collect();
    format!("<div class=\"facts\">{cards}</div>\n")
}

fn ranked(report: &ModelReport) -> String {
    let titles = [
        "", "Step", "Mesh", "Copies", "Batch", "Again", "Tokens/s", "TFLOP/s", "Memory",
    ];
    let titles: String = titles
        .iter()
        .map(|title| format!("<th>{title}</th>"))
        .collect();
    let row = |(number, found): (String, &ModelPrediction)| {
        let cells = std::iter::once(number).chain(report.cells(found));
        let cells: String = cells
            .map(|cell| format!("<td>{}</td>", escape(&cell)))
            .collect();
        format!("<tr>{cells}</tr>")
    };
    let sign = match report.ranked.ties {
        Some(_) => "; lines with = tie",
        None => "",
    };
    let rows: String = report.numbers().zip(report.shown()).map(row).collect();
    format!(
        "<h2 id=\"ranked\">Ranked</h2><p>The best of each mesh{sign}.{}{}</p><div \
         class=\"card\"><table><thead><tr>{titles}</tr></thead><tbody>{rows}</tbody></table></div>\n",
        sentences(&report.ties()),
        sentences(&report.sensitivity())
    )
}

/// Returns lines of the report as sentences, each after a space.
fn sentences(lines: &str) -> String {
    let lines = lines.lines().filter(|line| !line.is_empty());
    let sentence = |line: &str| {
        let (first, rest) = line.split_at(1);
        format!(" {}{rest}.", first.to_uppercase())
    };
    escape(&lines.map(sentence).collect::<String>())
}

fn step(report: &ModelReport) -> String {
    let all = report.best.seconds;
    let row = |phase: &StepPhase| {
        let part = 100.0 * phase.exposed / all;
        format!(
            "<tr><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{part:.1} \
             %<span class=\"bar grouped_gemm\" style=\"width:{part:.1}%\"></span></td>\
             <td>{}</td></tr>",
            escape(phase.name),
            units::seconds(phase.seconds),
            units::seconds(phase.exposed),
            escape(phase.behind.unwrap_or("–"))
        )
    };
    let rows: String = report.best.phases.iter().map(row).collect();
    let strategies = report.strategies();
    let strategies = escape(strategies.trim().trim_start_matches("the "));
    format!(
        "<h2 id=\"step\">Step</h2><p>What a rank of the slowest stage does. Times in the open add \
         up to the step. The {strategies}.</p><div class=\"card\"><table><thead><tr><th>What</th><th class=\"n\">Time\
         </th><th class=\"n\">In the open</th><th class=\"n\">Of the step</th><th>Behind</th></tr>\
         </thead><tbody>{rows}</tbody></table></div>\n"
    )
}

fn memory(report: &ModelReport) -> String {
    let gib = report.scenario.machine.compute.memory_gib;
    let limit = gib * f64::from(1u32 << 30);
    let memory = &report.best.memory;
    let row = |(name, bytes): &(&str, f64)| {
        let part = 100.0 * bytes / limit;
        let sum = if *name == "all" { " class=\"sum\"" } else { "" };
        format!(
            "<tr{sum}><td>{name}</td><td class=\"n\">{}</td><td class=\"n\">{part:.1} %<span \
             class=\"bar dispatch\" style=\"width:{part:.1}%\"></span></td></tr>",
            units::bytes(*bytes as u64)
        )
    };
    let rows: String = parts(memory).iter().map(row).collect();
    format!(
        "<h2 id=\"memory\">Memory</h2><p>A rank of stage {}, which needs most, of {gib} GiB.</p>\
         <div class=\"card\"><table><thead><tr><th>What</th><th class=\"n\">Bytes</th><th \
         class=\"n\">Of the machine's</th></tr></thead><tbody>{rows}</tbody></table></div>\n",
        memory.stage
    )
}

/// Renders the mesh that somebody runs beside the first; nothing without one.
fn compared(report: &ModelReport) -> String {
    let Some(compared) = &report.compared else {
        return String::new();
    };
    let row = |[what, first, this]: &[String; 3]| {
        let sum = match what.as_str() {
            "step" | "memory" => " class=\"sum\"",
            _ => "",
        };
        format!(
            "<tr{sum}><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td></tr>",
            escape(what),
            escape(first),
            escape(this)
        )
    };
    let rows: String = report.comparison(&compared.found).iter().map(row).collect();
    format!(
        "<h2 id=\"compared\">Compared</h2><p>{}.</p><div class=\"card\"><table><thead><tr><th>What\
         </th><th class=\"n\">First</th><th class=\"n\">This</th></tr></thead><tbody>{rows}</tbody>\
         </table></div>\n",
        escape(report.beside(compared).trim())
    )
}

/// The largest number of spans that a page draws.
const MOST_SPANS: usize = 6000;

fn stages(report: &ModelReport, timeline: &[Simulated]) -> String {
    let heading = "<h2 id=\"timeline\">Timeline</h2>";
    if timeline.len() > MOST_SPANS {
        return format!(
            "{heading}<p>{} passes are too many to draw: --trace FILE writes them.</p>\n",
            timeline.len()
        );
    }
    let end = timeline.iter().map(|event| event.end).fold(0.0, f64::max);
    let ranks: std::collections::BTreeSet<usize> =
        timeline.iter().map(|event| event.rank).collect();
    let lane = |rank: usize| ranks.iter().position(|own| *own == rank).unwrap_or(0);
    let (width, height) = (1000.0, 22.0);
    let mut spans = String::new();
    for event in timeline {
        let (class, offset, tall) = match (event.stream, event.name.split(' ').next()) {
            ("exchange", _) => ("dispatch", 15.0, 4.0),
            (_, Some("backward")) => ("combine", 0.0, 14.0),
            (_, Some("optimizer")) => ("gate_topk", 0.0, 14.0),
            _ => ("grouped_gemm", 0.0, 14.0),
        };
        let x = width * event.start / end;
        let wide = (width * (event.end - event.start) / end).max(0.3);
        let y = lane(event.rank) as f64 * height + offset;
        let _ = write!(
            spans,
            "<rect class=\"point {class}\" x=\"{x:.2}\" y=\"{y}\" width=\"{wide:.2}\" \
             height=\"{tall}\"><title>{}: {}</title></rect>",
            escape(&event.name),
            units::seconds(event.end - event.start)
        );
    }
    format!(
        "{heading}<p>One line for a rank of each of {}: passes, and below them exchanges once a \
         step. Ends after {}; messages between stages are left out.</p><div class=\"card roof\">\
         <svg viewBox=\"0 0 {width} {}\" role=\"img\">{spans}</svg></div>\n",
        units::count(report.best.stages.len(), "stage"),
        units::seconds(end),
        ranks.len() as f64 * height
    )
}
