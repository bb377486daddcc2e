//! The section on launches: what each does at every token count, and how it fills the machine.

use super::super::model::{InspectedLaunch, Inspection, LaunchSize};
use super::super::text::{bound, grid, grid_formula, intensity};
use super::{at, escape};
use crate::occupancy::{BlockNeeds, Unit, Waves};
use crate::units;
use moesaic::Target;
use moesaic::plan::TensorRole;

/// Renders the table, of which the page shows the rows of one token count at a time.
pub fn section(inspection: &Inspection) -> String {
    let bodies: String = (0..inspection.tokens.len())
        .map(|count| body(inspection, count))
        .collect();
    format!(
        "<h2 id=\"launches\">Launches</h2><p>The launches of one call, with the least arithmetic and \
         traffic of each, its shortest time and its share of the sum. {}</p>\
         <div class=\"card\"><table class=\"launches\"><thead><tr><th class=\"n opt\"></th>\
         <th class=\"keep\">Entry</th><th class=\"n\">Roofline</th>\
         <th class=\"n\">Time share</th><th class=\"n\">FLOP</th><th class=\"n\">Traffic</th>\
         <th class=\"n\">FLOP/byte</th><th>Grid</th>{}</tr></thead>{bodies}</table></div>\n{}",
        explanation(inspection.target),
        fill_titles(inspection.target),
        workspace(inspection)
    )
}

fn explanation(target: Target) -> &'static str {
    match target.hardware() {
        Target::Cpu(_) => {
            "A wave is a block on every thread; the tail is the part of the threads that have a \
             block in the last one."
        }
        _ => {
            "Occupancy is the part of a unit's threads that the blocks it holds fill; a wave is that \
             many blocks on every unit, and the tail the part of the last wave that has blocks."
        }
    }
}

fn fill_titles(target: Target) -> &'static str {
    match target.hardware() {
        Target::Cpu(_) => "<th class=\"n\">Waves</th>",
        _ => "<th class=\"n\">Threads</th><th class=\"n\">Occupancy</th><th class=\"n\">Waves</th>",
    }
}

fn body(inspection: &Inspection, count: usize) -> String {
    let runs = |launch: &&InspectedLaunch| launch.at[count].grid.iter().all(|&n| n > 0);
    let rows: String = inspection
        .launches
        .iter()
        .filter(runs)
        .map(|launch| row(inspection, launch, count))
        .collect();
    let (work, seconds) = inspection.total(count);
    let fills = fill_titles(inspection.target).matches("<th").count() + 1;
    format!(
        "<tbody {}>{rows}<tr class=\"sum\"><td class=\"opt\"></td><td class=\"keep\">all, T = {}</td>\
         <td class=\"n\">{}</td><td class=\"n\">100 %</td><td class=\"n\">{}</td>\
         <td class=\"n\">{}</td><td class=\"n\">{}</td><td colspan=\"{fills}\"></td></tr></tbody>",
        at(inspection, count),
        inspection.tokens[count],
        seconds.map_or("–".to_string(), units::seconds),
        units::flops(work.flops),
        units::traffic(work.bytes),
        units::short(intensity(&work)),
    )
}

fn row(inspection: &Inspection, launch: &InspectedLaunch, count: usize) -> String {
    let point = &launch.at[count];
    let formula = grid_formula(&inspection.entry(launch).launch).replace(" x ", " × ");
    let roofline = point.roofline.map(|roofline| roofline.seconds);
    let share = roofline.zip(inspection.total(count).1);
    let share = share.filter(|(_, sum)| *sum > 0.0);
    let share = share.map(|(own, sum)| 100.0 * own / sum);
    format!(
        "<tr class=\"{}\"><td class=\"n soft opt\">{}</td><td class=\"keep\"><span class=\"dot\"></span>\
         <code>{}</code></td><td class=\"n\">{}<span class=\"by\">{}</span></td>\
         <td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td>\
         <td class=\"grid\"><code>{}</code><span class=\"by\">{}</span></td>{}</tr>",
        inspection.kernels[launch.kernel].source.stem,
        launch.number,
        escape(&launch.label).replace('_', "_<wbr>"), // a long name takes two lines
        roofline.map_or("–".to_string(), units::seconds),
        bound(point, inspection.machine.as_ref()),
        share.map_or("–".to_string(), |share| format!(
            "{share:.1} %<span class=\"bar\" style=\"width:{share:.1}%\"></span>"
        )),
        units::flops(point.work.flops),
        units::traffic(point.work.bytes),
        units::short(intensity(&point.work)),
        grid(point).replace('x', "×"),
        escape(&formula),
        fill(inspection, launch, point),
    )
}

/// Returns the cells that say how the launch fills the machine.
fn fill(inspection: &Inspection, launch: &InspectedLaunch, point: &LaunchSize) -> String {
    let blocks = point.grid[0] * point.grid[1];
    let places = |per_unit: u64| {
        let units = inspection
            .machine
            .as_ref()
            .and_then(|machine| machine.units);
        units.map_or(0, |units| u64::from(units) * per_unit)
    };
    let waves = |waves: Option<Waves>| match waves {
        None => "<td class=\"n\">–</td>".to_string(),
        Some(waves) => format!(
            "<td class=\"n\">{}<span class=\"by\">tail {:.0} %</span></td>",
            waves.number,
            100.0 * waves.tail
        ),
    };
    if let Target::Cpu(_) = inspection.target.hardware() {
        return waves(Waves::new(blocks, places(1)));
    }
    let threads = inspection.entry(launch).launch.threads;
    let unit = Unit::of(inspection.target).zip(block(inspection, launch));
    let Some((unit, block)) = unit else {
        return format!(
            "<td class=\"n\">{threads}</td><td class=\"n\">–</td>{}",
            waves(None)
        );
    };
    let resident = unit.resident(block);
    format!(
        "<td class=\"n\">{threads}</td><td class=\"n\">{:.0} %<span class=\"by\">{}</span></td>{}",
        100.0 * unit.occupancy(block),
        units::count(resident as usize, "block"),
        waves(Waves::new(blocks, places(u64::from(resident))))
    )
}

/// Returns the needs of a block, if the binary reports them.
pub fn block(inspection: &Inspection, launch: &InspectedLaunch) -> Option<BlockNeeds> {
    let report = inspection.kernels[launch.kernel].report(launch)?;
    let geometry = &inspection.entry(launch).launch;
    Some(BlockNeeds {
        threads: geometry.threads,
        registers: report.registers?,
        shared: report.shared_bytes.unwrap_or(0) + geometry.shared_bytes,
    })
}

/// Renders the bytes between the launches at every token count.
fn workspace(inspection: &Inspection) -> String {
    let bytes = |role: TensorRole, tokens: u64| -> u64 {
        let tensors = inspection.plan.tensors.iter();
        let own = tensors.filter(|tensor| tensor.role == role);
        own.map(|tensor| tensor.bytes(tokens)).sum()
    };
    let row = |&tokens: &u64| {
        let own = [TensorRole::Scratch, TensorRole::Input, TensorRole::Output]
            .map(|role| bytes(role, tokens));
        let cells: String = own
            .iter()
            .map(|&bytes| format!("<td class=\"n\">{}</td>", units::bytes(bytes)))
            .collect();
        format!("<tr><td class=\"n\">{tokens}</td>{cells}</tr>")
    };
    let rows: String = inspection.tokens.iter().map(row).collect();
    format!(
        "<h2 id=\"workspace\">Workspace</h2><p>The bytes of the tensors between launches, and of \
         inputs and outputs, without weights. An engine rounds each tensor up.</p>\
         <div class=\"card\"><table><thead><tr><th class=\"n\">T</th><th class=\"n\">Workspace</th>\
         <th class=\"n\">Inputs</th><th class=\"n\">Outputs</th></tr></thead>\
         <tbody>{rows}</tbody></table></div>\n"
    )
}
