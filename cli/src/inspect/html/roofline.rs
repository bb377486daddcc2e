//! The roofline as a drawing and a table.

use super::super::model::{Inspection, Launch, arithmetic};
use super::super::text::{bound, intensity};
use super::escape;
use crate::machine::Machine;
use crate::units;
use moesaic::DType;

const WIDTH: f64 = 980.0;
const HEIGHT: f64 = 440.0;
const LEFT: f64 = 76.0;
const RIGHT: f64 = 24.0;
const TOP: f64 = 22.0;
const BOTTOM: f64 = 52.0;

/// Renders the drawing and the table.
pub fn section(inspection: &Inspection, machine: &Machine) -> String {
    let idle: Vec<String> = inspection
        .launches
        .iter()
        .filter(|launch| launch.at.iter().all(|at| at.work.flops == 0.0))
        .map(|launch| format!("<code>{}</code>", escape(&launch.label)))
        .collect();
    let idle = if idle.is_empty() {
        String::new()
    } else {
        format!(" Only moving bytes, and not drawn: {}.", idle.join(", "))
    };
    format!(
        "<h2 id=\"roofline\">Roofline</h2><p>The roofline of each launch on {}: numbered \
         circles stand for the largest token count, small ones for the others. The table shows \
         arithmetic and traffic at the largest count, and the roofline time at each count with the \
         limit that sets it.{idle}</p>\
         <div class=\"card roof\">{}</div><p></p><div class=\"card\">{}</div>\n",
        escape(&machine.name),
        drawing(inspection, machine),
        table(inspection)
    )
}

/// The logarithmic axes of the drawing.
struct Axes {
    x: [f64; 2],
    y: [f64; 2],
}

impl Axes {
    fn of(machine: &Machine, intensities: &[f64]) -> Axes {
        let top = machine.flops(DType::Bf16).max(machine.f32_flops);
        let ridge = top / machine.bytes_per_second();
        let lowest = intensities.iter().copied().fold(ridge / 10.0, f64::min);
        let most = intensities.iter().copied().fold(ridge * 10.0, f64::max);
        let x = [
            decade(lowest / 1.5, f64::floor),
            decade(most * 1.5, f64::ceil),
        ];
        let y = [
            decade(x[0] * machine.bytes_per_second(), f64::floor),
            decade(top * 1.3, f64::ceil),
        ];
        Axes { x, y }
    }

    fn px(&self, intensity: f64) -> f64 {
        LEFT + (WIDTH - LEFT - RIGHT) * share(intensity, self.x)
    }

    fn py(&self, rate: f64) -> f64 {
        HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share(rate, self.y)
    }
}

fn share(value: f64, [from, to]: [f64; 2]) -> f64 {
    ((value / from).ln() / (to / from).ln()).clamp(0.0, 1.0)
}

fn decade(value: f64, round: fn(f64) -> f64) -> f64 {
    10f64.powf(round(value.log10()))
}

fn decades([from, to]: [f64; 2]) -> impl Iterator<Item = f64> {
    let (first, last) = (from.log10().round() as i32, to.log10().round() as i32);
    (first..=last).map(|power| 10f64.powi(power))
}

fn drawing(inspection: &Inspection, machine: &Machine) -> String {
    let launches = drawn(inspection);
    let works = launches
        .iter()
        .flat_map(|launch| &launch.at)
        .map(|at| intensity(&at.work));
    let intensities: Vec<f64> = works.filter(|i| *i > 0.0).collect();
    let axes = Axes::of(machine, &intensities);
    let half = machine.half().filter(|_| half_is_used(inspection, machine));
    let mut parts = vec![grid(&axes)];
    parts.push(roof(&axes, machine, machine.f32_flops, "f32", ""));
    if let Some((rate, name)) = half {
        parts.push(roof(&axes, machine, rate, name, "half"));
    }
    parts.extend(points(&launches, inspection, &axes));
    format!(
        "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"roofline\">{}</svg>",
        parts.concat()
    )
}

fn half_is_used(inspection: &Inspection, machine: &Machine) -> bool {
    let kernels = inspection.plan.kernels.iter();
    let mut types = kernels.map(|kernel| arithmetic(kernel, &inspection.plan.spec));
    types.any(|dtype| match dtype {
        DType::F16 => machine.f16_flops.is_some(),
        dtype => dtype == DType::Bf16,
    })
}

fn drawn(inspection: &Inspection) -> Vec<&Launch> {
    let works = |launch: &&Launch| launch.at.iter().any(|at| at.work.flops > 0.0);
    inspection.launches.iter().filter(works).collect()
}

fn grid(axes: &Axes) -> String {
    let mut svg = String::new();
    let (bottom, right) = (HEIGHT - BOTTOM, WIDTH - RIGHT);
    for value in decades(axes.x) {
        let x = axes.px(value);
        svg += &format!(
            "<line class=\"grid\" x1=\"{x:.1}\" y1=\"{TOP}\" x2=\"{x:.1}\" y2=\"{bottom}\"/>\
             <text class=\"tick\" x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            bottom + 17.0,
            plain(value)
        );
    }
    for value in decades(axes.y) {
        let y = axes.py(value);
        svg += &format!(
            "<line class=\"grid\" x1=\"{LEFT}\" y1=\"{y:.1}\" x2=\"{right}\" y2=\"{y:.1}\"/>\
             <text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            LEFT - 8.0,
            y + 4.0,
            units::flops(value).replace("FLOP", "")
        );
    }
    let middle = (LEFT + right) / 2.0;
    svg + &format!(
        "<text class=\"axis\" x=\"{middle}\" y=\"{:.1}\" text-anchor=\"middle\">FLOP per byte</text>\
         <text class=\"axis\" transform=\"translate(14 {:.1}) rotate(-90)\" text-anchor=\"middle\">FLOP/s</text>",
        HEIGHT - 10.0,
        (TOP + bottom) / 2.0
    )
}

/// Formats a number without an exponent, such as `0.01`, `1` or `1000`.
fn plain(value: f64) -> String {
    if value >= 1.0 {
        format!("{value:.0}")
    } else {
        format!("{value}")
    }
}

fn roof(axes: &Axes, machine: &Machine, flops: f64, name: &str, class: &str) -> String {
    let ridge = flops / machine.bytes_per_second();
    let start = (axes.x[0], axes.x[0] * machine.bytes_per_second());
    let corner = (axes.px(ridge), axes.py(flops));
    let end = WIDTH - RIGHT;
    let memory = match class {
        "" => format!(
            "<text class=\"label\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
            axes.px(start.0) + 10.0,
            axes.py(start.1 * 1.6) - 22.0,
            units::byte_rate(machine.bytes_per_second())
        ),
        _ => String::new(),
    };
    format!(
        "<path class=\"roofline {class}\" d=\"M{:.1} {:.1} L{:.1} {:.1} L{end:.1} {:.1}\"/>\
         <text class=\"label {class}\" x=\"{end:.1}\" y=\"{:.1}\" text-anchor=\"end\">{} {name}</text>{memory}",
        axes.px(start.0),
        axes.py(start.1),
        corner.0,
        corner.1,
        corner.1,
        corner.1 - 15.0,
        units::flop_rate(flops)
    )
}

/// Draws each launch at each token count, with the numbers on top.
fn points(launches: &[&Launch], inspection: &Inspection, axes: &Axes) -> Vec<String> {
    let (mut small, mut large, mut taken) = (Vec::new(), Vec::new(), Vec::new());
    for launch in launches {
        let stem = inspection.kernels[launch.kernel].source.stem;
        let places: Vec<(f64, f64, String)> = launch
            .at
            .iter()
            .filter(|at| at.work.flops > 0.0)
            .map(|at| {
                let intensity = intensity(&at.work);
                let seconds = at.roofline.map_or(f64::NAN, |roofline| roofline.seconds);
                let rate = at.work.flops / seconds;
                (
                    axes.px(intensity),
                    axes.py(rate),
                    title(launch, at.tokens, intensity, rate),
                )
            })
            .collect();
        let Some(((x, y, name), smaller)) = places.split_last() else {
            continue;
        };
        for (x, y, name) in smaller {
            small.push(format!(
                "<circle class=\"small {stem}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\"><title>{name}</title></circle>"
            ));
        }
        large.push(numbered(
            launch.number,
            &stem.to_string(),
            (*x, *y),
            name,
            &mut taken,
        ));
    }
    small.into_iter().chain(large).collect()
}

fn title(launch: &Launch, tokens: u64, intensity: f64, rate: f64) -> String {
    escape(&format!(
        "{} at T = {tokens}: {} FLOP/byte, at most {}",
        launch.label,
        units::short(intensity),
        units::flop_rate(rate)
    ))
}

/// Draws a circle with a number, moved down if another circle is in the way.
fn numbered(
    number: usize,
    stem: &str,
    (x, y): (f64, f64),
    title: &str,
    taken: &mut Vec<(f64, f64)>,
) -> String {
    let mut at = (x, y);
    while taken
        .iter()
        .any(|other| (other.0 - at.0).hypot(other.1 - at.1) < 20.0)
    {
        at.1 += 21.0;
    }
    taken.push(at);
    let pointer = if at.1 > y {
        format!(
            "<line class=\"pointer {stem}\" x1=\"{x:.1}\" y1=\"{y:.1}\" x2=\"{x:.1}\" y2=\"{:.1}\"/>",
            at.1
        )
    } else {
        String::new()
    };
    format!(
        "{pointer}<g class=\"{stem}\"><title>{title}</title><circle class=\"point\" cx=\"{:.1}\" cy=\"{:.1}\" r=\"9.5\"/>\
         <text class=\"digit\" x=\"{:.1}\" y=\"{:.1}\">{number}</text></g>",
        at.0,
        at.1,
        at.0,
        at.1 + 4.0
    )
}

fn table(inspection: &Inspection) -> String {
    let counts = inspection.tokens.iter();
    let counts: String = counts
        .map(|t| format!("<th class=\"n\">T = {t}</th>"))
        .collect();
    let rows: String = inspection
        .launches
        .iter()
        .map(|launch| row(inspection, launch))
        .collect();
    let sums: String = (0..inspection.tokens.len())
        .map(|i| {
            let roofline = inspection
                .total(i)
                .1
                .map_or("–".to_string(), units::seconds);
            format!("<td class=\"n\">{roofline}</td>")
        })
        .collect();
    format!(
        "<table><thead><tr><th class=\"n\"></th><th>Entry</th><th class=\"n\">Arithmetic</th>\
         <th class=\"n\">Traffic</th><th class=\"n\">FLOP/byte</th>{counts}</tr></thead>\
         <tbody>{rows}<tr class=\"sum\"><td></td><td>sum of rooflines</td><td></td><td></td><td></td>{sums}</tr></tbody></table>"
    )
}

fn row(inspection: &Inspection, launch: &Launch) -> String {
    let cells: String = launch
        .at
        .iter()
        .map(|at| {
            let roofline = at.roofline.map_or("–".to_string(), |roofline| {
                units::seconds(roofline.seconds)
            });
            format!(
                "<td class=\"n\">{roofline}<span class=\"by\">{}</span></td>",
                bound(at, inspection.machine.as_ref())
            )
        })
        .collect();
    let work = launch.at.last().map(|at| at.work).unwrap_or_default();
    format!(
        "<tr class=\"{}\"><td class=\"n soft\">{}</td><td><span class=\"dot\"></span><code>{}</code></td>\
         <td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td>{cells}</tr>",
        inspection.kernels[launch.kernel].source.stem,
        launch.number,
        escape(&launch.label),
        units::flops(work.flops),
        units::traffic(work.bytes),
        units::short(intensity(&work)),
    )
}
