//! The roofline as a drawing, once for wide screens and once for narrow ones.

use super::super::model::{InspectedLaunch, Inspection, arithmetic};
use super::super::text::intensity;
use super::{at, escape};
use crate::machine::MachineLimits;
use crate::units;
use moesaic::DType;
use moesaic::plan::MemoryLevel;
use std::f64::consts::FRAC_PI_6;

/// The size of a drawing and of its margins.
struct Frame {
    class: &'static str,
    width: f64,
    height: f64,
    left: f64,
}

const WIDE: Frame = Frame {
    class: "wide",
    width: 980.0,
    height: 460.0,
    left: 76.0,
};

const NARROW: Frame = Frame {
    class: "narrow",
    width: 400.0,
    height: 360.0,
    left: 52.0,
};

const RIGHT: f64 = 18.0;
const TOP: f64 = 24.0;
const BOTTOM: f64 = 50.0;

impl Frame {
    fn bottom(&self) -> f64 {
        self.height - BOTTOM
    }

    fn right(&self) -> f64 {
        self.width - RIGHT
    }
}

/// Renders the drawing with its explanation.
pub fn section(inspection: &Inspection, machine: &MachineLimits) -> String {
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
    let floor = match machine.launch_seconds {
        0.0 => String::new(),
        seconds => format!(
            " A circle below every line is a launch that does less than fits into {}, the shortest \
             time of a launch.",
            units::seconds(seconds)
        ),
    };
    let unknown = machine
        .levels
        .iter()
        .find(|level| level.bytes_per_second.is_none());
    let unknown = unknown.map_or(String::new(), |cache| {
        format!(
            " The rate of the {} {} is not published, so a circle may be above the line of memory \
             where its bytes fit into the {}.",
            units::bytes(cache.capacity.unwrap_or(0)),
            cache.name,
            cache.name
        )
    });
    format!(
        "<h2 id=\"roofline\">Roofline</h2><p>The most that each launch can reach on {}: its circle is \
         at its arithmetic intensity and the FLOP/s of its shortest time. Its bytes are charged to \
         the smallest cache that holds all of them.{unknown}{floor} Faint circles are the other token \
         counts.{idle}</p><div class=\"card roof\">{}{}</div>\n",
        escape(&machine.name),
        drawing(inspection, machine, &WIDE),
        drawing(inspection, machine, &NARROW),
    )
}

/// The logarithmic axes of a drawing.
struct Axes<'f> {
    frame: &'f Frame,
    x: [f64; 2],
    y: [f64; 2],
}

impl Axes<'_> {
    fn of<'f>(machine: &MachineLimits, points: &[Point<'_>], frame: &'f Frame) -> Axes<'f> {
        let top = machine.flops(DType::Bf16).max(machine.f32_flops);
        let ridge = top / machine.bytes_per_second();
        let xs = points.iter().map(|point| point.intensity);
        let lowest = xs.clone().fold(ridge / 10.0, f64::min);
        let most = xs.fold(ridge * 10.0, f64::max);
        let x = [
            decade(lowest / 1.5, f64::floor),
            decade(most * 1.5, f64::ceil),
        ];
        let slow = x[0] * machine.bytes_per_second();
        let slow = points.iter().map(|point| point.rate).fold(slow, f64::min);
        let y = [decade(slow / 1.5, f64::floor), decade(top * 1.3, f64::ceil)];
        Axes { frame, x, y }
    }

    fn px(&self, intensity: f64) -> f64 {
        let frame = self.frame;
        frame.left + (frame.right() - frame.left) * share(intensity, self.x)
    }

    fn py(&self, rate: f64) -> f64 {
        let frame = self.frame;
        frame.bottom() - (frame.bottom() - TOP) * share(rate, self.y)
    }
}

fn share(value: f64, [from, to]: [f64; 2]) -> f64 {
    ((value / from).ln() / (to / from).ln()).clamp(0.0, 1.0)
}

fn decade(value: f64, round: fn(f64) -> f64) -> f64 {
    10f64.powf(round(value.log10()))
}

fn decades([from, to]: [f64; 2], most: usize) -> impl Iterator<Item = f64> {
    let (first, last) = (from.log10().round() as i32, to.log10().round() as i32);
    let step = ((last - first) as usize / most + 1).max(1);
    (first..=last).step_by(step).map(|power| 10f64.powi(power))
}

/// A launch at one token count.
struct Point<'l> {
    launch: &'l InspectedLaunch,
    /// The index of the token count.
    count: usize,
    intensity: f64,
    /// The FLOP/s of the roofline's time.
    rate: f64,
}

fn points(inspection: &Inspection) -> Vec<Point<'_>> {
    let each = inspection.launches.iter().flat_map(|launch| {
        let at = launch.at.iter().enumerate();
        at.filter_map(move |(count, at)| {
            let seconds = at.roofline?.seconds;
            (at.work.flops > 0.0 && at.work.bytes > 0.0 && seconds > 0.0).then(|| Point {
                launch,
                count,
                intensity: intensity(&at.work),
                rate: at.work.flops / seconds,
            })
        })
    });
    each.collect()
}

fn drawing(inspection: &Inspection, machine: &MachineLimits, frame: &Frame) -> String {
    let points = points(inspection);
    let axes = Axes::of(machine, &points, frame);
    let half = machine.half().filter(|_| half_is_used(inspection, machine));
    let top = half.map_or(machine.f32_flops, |(rate, _)| rate.max(machine.f32_flops));
    let mut parts = vec![grid(&axes)];
    parts.extend(diagonals(&axes, machine, top));
    parts.push(ceiling(
        &axes,
        machine,
        machine.f32_flops,
        machine.f32_name,
        "",
    ));
    if let Some((rate, name)) = half {
        parts.push(ceiling(&axes, machine, rate, name, "half"));
    }
    parts.extend(points.iter().map(|point| faint(inspection, &axes, point)));
    for count in 0..inspection.tokens.len() {
        let own = points.iter().filter(|point| point.count == count);
        let own: Vec<&Point<'_>> = own.collect();
        let circles = numbered(inspection, &axes, &own, texts(&axes, machine));
        parts.push(format!("<g {}>{circles}</g>", at(inspection, count)));
    }
    format!(
        "<svg class=\"{}\" viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"roofline\">{}</svg>",
        frame.class,
        frame.width,
        frame.height,
        parts.concat()
    )
}

fn half_is_used(inspection: &Inspection, machine: &MachineLimits) -> bool {
    let kernels = inspection.plan.kernels.iter();
    let mut types = kernels.map(|kernel| arithmetic(kernel, &inspection.plan.spec));
    types.any(|dtype| match dtype {
        DType::F16 => machine.f16_flops.is_some(),
        dtype => dtype == DType::Bf16,
    })
}

fn grid(axes: &Axes<'_>) -> String {
    let mut svg = String::new();
    let (bottom, right, left) = (axes.frame.bottom(), axes.frame.right(), axes.frame.left);
    for value in decades(axes.x, 8) {
        let x = axes.px(value);
        svg += &format!(
            "<line class=\"grid\" x1=\"{x:.1}\" y1=\"{TOP}\" x2=\"{x:.1}\" y2=\"{bottom}\"/>\
             <text class=\"tick\" x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            bottom + 17.0,
            plain(value)
        );
    }
    for value in decades(axes.y, 10) {
        let y = axes.py(value);
        svg += &format!(
            "<line class=\"grid\" x1=\"{left}\" y1=\"{y:.1}\" x2=\"{right}\" y2=\"{y:.1}\"/>\
             <text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            left - 8.0,
            y + 4.0,
            units::flops(value).replace("FLOP", "").trim_end()
        );
    }
    let middle = (left + right) / 2.0;
    svg + &format!(
        "<text class=\"axis\" x=\"{middle}\" y=\"{:.1}\" text-anchor=\"middle\">FLOP per byte</text>\
         <text class=\"axis\" x=\"4\" y=\"{:.1}\">FLOP/s</text>",
        axes.frame.height - 10.0,
        TOP - 10.0
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

/// Draws the line of each level whose rate is known, up to the highest ceiling, and their names in
/// the corner below all lines, in the order of the lines.
fn diagonals(axes: &Axes<'_>, machine: &MachineLimits, top: f64) -> Vec<String> {
    let known = machine.levels.iter().rev();
    let known = known.filter_map(|level| Some((level, level.bytes_per_second?)));
    let line = |(i, (level, rate)): (usize, (&MemoryLevel, f64))| {
        let from = axes.x[0].max(axes.y[0] / rate);
        let to = (top / rate).min(axes.x[1]);
        let class = if level.capacity.is_none() {
            ""
        } else {
            "cache"
        };
        let held = level
            .capacity
            .map_or(String::new(), |bytes| format!("{} ", units::bytes(bytes)));
        format!(
            "<path class=\"roofline {class}\" d=\"M{:.1} {:.1} L{:.1} {:.1}\"/>\
             <text class=\"label {class}\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{held}{}: {}</text>",
            axes.px(from),
            axes.py(from * rate),
            axes.px(to),
            axes.py(to * rate),
            axes.frame.right() - 8.0,
            axes.frame.bottom() - 10.0 - 15.0 * i as f64,
            escape(&level.name),
            units::byte_rate(rate)
        )
    };
    known.enumerate().map(line).collect()
}

/// Draws the rate of one kind of arithmetic, from where the fastest level reaches it.
fn ceiling(
    axes: &Axes<'_>,
    machine: &MachineLimits,
    flops: f64,
    name: &str,
    class: &str,
) -> String {
    let rates = machine
        .levels
        .iter()
        .filter_map(|level| level.bytes_per_second);
    let fastest = rates.fold(f64::MIN_POSITIVE, f64::max);
    let (y, end) = (axes.py(flops), axes.frame.right());
    format!(
        "<path class=\"roofline {class}\" d=\"M{:.1} {y:.1} L{end:.1} {y:.1}\"/>\
         <text class=\"label {class}\" x=\"{end:.1}\" y=\"{:.1}\" text-anchor=\"end\">{} {name}</text>",
        axes.px(flops / fastest),
        ceiling_label(y, class),
        units::flop_rate(flops)
    )
}

/// Returns the height of a ceiling's text: above the line of tensor cores, below the other.
fn ceiling_label(y: f64, class: &str) -> f64 {
    if class.is_empty() { y + 15.0 } else { y - 7.0 }
}

/// Returns places that the texts of ceilings take.
fn texts(axes: &Axes<'_>, machine: &MachineLimits) -> Vec<(f64, f64)> {
    let half = machine.half().map(|(rate, _)| (rate, "half"));
    let each = [(machine.f32_flops, "")].into_iter().chain(half);
    let places = each.flat_map(|(rate, class)| {
        let y = ceiling_label(axes.py(rate), class) - 4.0;
        (0..8).map(move |i| (axes.frame.right() - 8.0 - 14.0 * f64::from(i), y))
    });
    places.collect()
}

fn faint(inspection: &Inspection, axes: &Axes<'_>, point: &Point<'_>) -> String {
    format!(
        "<circle class=\"small {}\" cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\"><title>{}</title></circle>",
        inspection.kernels[point.launch.kernel].source.stem,
        axes.px(point.intensity),
        axes.py(point.rate),
        title(inspection, point)
    )
}

fn title(inspection: &Inspection, point: &Point<'_>) -> String {
    escape(&format!(
        "{}. {} at T = {}: {} FLOP/byte, at most {}",
        point.launch.number,
        point.launch.label,
        inspection.tokens[point.count],
        units::short(point.intensity),
        units::flop_rate(point.rate)
    ))
}

/// Draws circles at their places, each with its number beside it: numbers move out of each other's
/// way, circles do not.
fn numbered(
    inspection: &Inspection,
    axes: &Axes<'_>,
    points: &[&Point<'_>],
    texts: Vec<(f64, f64)>,
) -> String {
    let place = |point: &&Point<'_>| (axes.px(point.intensity), axes.py(point.rate));
    let places: Vec<(f64, f64)> = points.iter().map(place).collect();
    let mut labels = texts;
    let mut svg = String::new();
    for (point, &(x, y)) in points.iter().zip(&places) {
        let label = free_place(axes.frame, (x, y), &places, &labels);
        labels.push(label);
        svg += &format!(
            "<g class=\"{}\"><title>{}</title><line class=\"pointer\" x1=\"{x:.1}\" y1=\"{y:.1}\" \
             x2=\"{:.1}\" y2=\"{:.1}\"/><circle class=\"point\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"5\"/>\
             <circle class=\"halo\" cx=\"{2:.1}\" cy=\"{3:.1}\" r=\"9\"/>\
             <text class=\"digit\" x=\"{2:.1}\" y=\"{4:.1}\">{5}</text></g>",
            inspection.kernels[point.launch.kernel].source.stem,
            title(inspection, point),
            label.0,
            label.1,
            label.1 + 4.0,
            point.launch.number,
        );
    }
    svg
}

/// Returns a place near a circle that no other circle or number takes.
fn free_place(
    frame: &Frame,
    (x, y): (f64, f64),
    circles: &[(f64, f64)],
    labels: &[(f64, f64)],
) -> (f64, f64) {
    let far = |from: (f64, f64), others: &[(f64, f64)], least: f64| {
        let mut gaps = others.iter().map(|o| (o.0 - from.0).hypot(o.1 - from.1));
        gaps.all(|gap| gap >= least)
    };
    let rings = (0..8).flat_map(|ring| (0..12).map(move |turn| (ring, turn)));
    let places = rings.map(|(ring, turn)| {
        let (radius, angle) = (
            17.0 + 12.0 * f64::from(ring),
            f64::from(turn) * FRAC_PI_6 + 1.0,
        );
        (x + radius * angle.cos(), y + radius * angle.sin())
    });
    let inside = |place: &(f64, f64)| {
        let across = frame.left + 10.0..frame.right() - 8.0;
        across.contains(&place.0) && (TOP..frame.bottom() - 8.0).contains(&place.1)
    };
    let mut free = places.filter(inside);
    free.find(|&place| far(place, labels, 19.0) && far(place, circles, 14.5))
        .unwrap_or((x, y - 17.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_keep_away_from_circles_and_each_other() {
        let circles = [(200.0, 200.0), (203.0, 200.0), (206.0, 203.0)];
        let mut labels = Vec::new();
        for circle in circles {
            let place = free_place(&WIDE, circle, &circles, &labels);
            let gap = |other: &(f64, f64)| (other.0 - place.0).hypot(other.1 - place.1);
            assert!(labels.iter().all(|label| gap(label) >= 19.0), "{place:?}");
            assert!(
                circles.iter().all(|circle| gap(circle) >= 14.5),
                "{place:?}"
            );
            labels.push(place);
        }
    }
}
