//! A line chart as SVG, readable on light and on dark backgrounds.

use std::fmt::Write;

/// One line of a chart.
pub struct Series<'a> {
    /// The name, written at the end of the line.
    pub name: &'a str,
    /// An SVG colour with enough contrast on white and on black.
    pub colour: &'a str,
    /// The points, from left to right.
    pub points: Vec<(f64, f64)>,
}

/// Blue and orange, which colour-blind readers can tell apart.
pub const COLOURS: [&str; 2] = ["#2f81f7", "#d9730d"];

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 150.0;
const TOP: f64 = 48.0;
const BOTTOM: f64 = 52.0;
/// A grey that is legible on both backgrounds.
const INK: &str = "#7d8590";

/// A mapping from values to places on the page.
struct Scale {
    x: (f64, f64),
    y: (f64, f64),
}

impl Scale {
    fn of(series: &[Series]) -> Scale {
        let points = || series.iter().flat_map(|s| &s.points);
        let range = |pick: fn(&(f64, f64)) -> f64| {
            let least = points().map(pick).fold(f64::INFINITY, f64::min);
            let most = points().map(pick).fold(f64::NEG_INFINITY, f64::max);
            (least, if most > least { most } else { least + 1.0 })
        };
        let (low, high) = range(|p| p.1);
        let step = tick_step(high - low);
        Scale {
            x: range(|p| p.0),
            y: ((low / step).floor() * step, (high / step).ceil() * step),
        }
    }

    fn x(&self, value: f64) -> f64 {
        LEFT + (value - self.x.0) / (self.x.1 - self.x.0) * (WIDTH - LEFT - RIGHT)
    }

    fn y(&self, value: f64) -> f64 {
        HEIGHT - BOTTOM - (value - self.y.0) / (self.y.1 - self.y.0) * (HEIGHT - TOP - BOTTOM)
    }
}

/// Returns 1, 2 or 5 times a power of ten, for four to ten ticks.
fn tick_step(range: f64) -> f64 {
    let power = 10f64.powf((range / 5.0).log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|s| s * power);
    let enough = |step: &f64| range / step <= 8.0;
    steps.into_iter().find(enough).unwrap_or(10.0 * power)
}

fn ticks((low, high): (f64, f64)) -> Vec<f64> {
    let step = tick_step(high - low);
    let first = (low / step - 1e-9).ceil() as i64;
    (first..)
        .map(|i| i as f64 * step)
        .take_while(|v| *v <= high + 1e-9 * step)
        .collect()
}

fn text(svg: &mut String, (x, y): (f64, f64), anchor: &str, colour: &str, words: &str) {
    let words = words.replace('&', "&amp;").replace('<', "&lt;");
    let _ = writeln!(
        svg,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" fill=\"{colour}\">{words}</text>"
    );
}

fn axes(svg: &mut String, scale: &Scale) {
    let right = WIDTH - RIGHT;
    for value in ticks(scale.y) {
        let y = scale.y(value);
        let _ = writeln!(
            svg,
            "<path d=\"M{LEFT} {y:.1}H{right}\" stroke=\"{INK}\" stroke-opacity=\"0.3\"/>"
        );
        let label = format!("{:.3}", value);
        let label = label.trim_end_matches('0').trim_end_matches('.');
        text(svg, (LEFT - 8.0, y + 4.0), "end", INK, label);
    }
    for value in ticks(scale.x) {
        let x = scale.x(value);
        text(
            svg,
            (x, HEIGHT - BOTTOM + 20.0),
            "middle",
            INK,
            &format!("{value}"),
        );
    }
}

fn line(svg: &mut String, scale: &Scale, series: &Series) {
    let mut path = String::new();
    for (i, (x, y)) in series.points.iter().enumerate() {
        let command = if i == 0 { 'M' } else { 'L' };
        let _ = write!(path, "{command}{:.1} {:.1}", scale.x(*x), scale.y(*y));
    }
    let colour = series.colour;
    let _ = writeln!(
        svg,
        "<path d=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>"
    );
}

/// Writes names at the ends of the lines, kept apart.
fn names(svg: &mut String, scale: &Scale, series: &[Series]) {
    let mut ends: Vec<(f64, &Series)> = series
        .iter()
        .filter_map(|s| s.points.last().map(|p| (scale.y(p.1) + 4.0, s)))
        .collect();
    ends.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut least = f64::NEG_INFINITY;
    for (y, series) in ends {
        let y = y.max(least);
        text(
            svg,
            (WIDTH - RIGHT + 8.0, y),
            "start",
            series.colour,
            series.name,
        );
        least = y + 16.0;
    }
}

/// Returns the chart; `labels` are those of the two axes.
pub fn svg(title: &str, labels: [&str; 2], series: &[Series]) -> String {
    let scale = Scale::of(series);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
         font-family=\"sans-serif\" font-size=\"13\">\n<title>{title}</title>\n"
    );
    text(&mut svg, (LEFT, 20.0), "start", INK, title);
    text(&mut svg, (LEFT - 40.0, TOP - 8.0), "start", INK, labels[1]);
    let middle = (LEFT + WIDTH - RIGHT) / 2.0;
    text(&mut svg, (middle, HEIGHT - 8.0), "middle", INK, labels[0]);
    axes(&mut svg, &scale);
    for series in series {
        line(&mut svg, &scale, series);
    }
    names(&mut svg, &scale, series);
    svg.push_str("</svg>\n");
    svg
}
