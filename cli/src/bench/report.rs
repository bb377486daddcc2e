//! The output of `bench`.

use super::measure::{AgainstUniform, LaunchTime, Run};
use crate::inspect::{arithmetic, machine_json, roofs};
use crate::machine::{FASTER, Share, Watched};
use crate::palette::Palette;
use crate::table::{Cell, Table};
use crate::units;
use moesaic::reference::Skew;
use moesaic::{Engine, Layer};
use serde_json::{Value, json};

/// A finished bench.
pub struct BenchReport<'a> {
    pub engine: &'a Engine,
    pub layer: &'a Layer,
    /// The limits of the machine, if they are known.
    pub limits: Option<Watched>,
    /// The error of `y` against the reference.
    pub error: f64,
    /// The skew of the tokens, if one was requested.
    pub skew: Option<Skew>,
    pub runs: Vec<Run>,
}

impl BenchReport<'_> {
    /// Renders the report for people.
    pub fn text(&self, palette: &Palette) -> String {
        let title = format!("{} on {}", self.layer.spec().name, self.engine.target());
        let device = self.engine.device_info();
        let limits = match &self.limits {
            Some(limits) => format!("limits: {}", roofs(&limits.machine)),
            None => "limits: not known; --machine names a GPU".to_string(),
        };
        let mut text = format!(
            "{}\n  {} ({} units)\n  {limits}\n  largest error of y {:.1e} of its largest element\n",
            palette.bold(&title),
            device.name,
            device.units,
            self.error
        );
        let tuned: Vec<String> = self.tuned().map(|tokens| tokens.to_string()).collect();
        if !tuned.is_empty() {
            text += &format!("  tiles tuned for T={}\n", tuned.join(","));
        }
        for run in &self.runs {
            text += &self.run_text(run, palette);
        }
        text
    }

    /// Returns the numbers of tokens for which tiles were measured.
    fn tuned(&self) -> impl Iterator<Item = usize> {
        self.layer.tilings().buckets().map(|(tokens, _)| tokens)
    }

    fn run_text(&self, run: &Run, palette: &Palette) -> String {
        let rate = run.tokens as f64 / run.time().as_secs_f64();
        let title = format!(
            "{}, median of {}",
            units::count(run.tokens, "token"),
            run.repeats
        );
        let titles = [
            "LAUNCH",
            ">TIME",
            ">SPREAD",
            ">GFLOP/s",
            ">GB/s",
            ">ROOFLINE",
            ">% OF ROOFLINE",
        ];
        let mut table = Table::new(&titles);
        for launch in &run.launches {
            table.row(self.cells(launch));
        }
        table.row(self.sum(run));
        let against = run.against.as_ref().map(|against| self.against(against));
        let faster = self.shares(run).any(|share| share == Share::Faster);
        format!(
            "\n{} ({} tokens/s; a call from host memory takes {})\n{}{}{}",
            palette.bold(&title),
            units::short(rate),
            units::seconds(run.call.as_secs_f64()),
            table.render(palette),
            if faster {
                format!("* {FASTER}\n")
            } else {
                String::new()
            },
            against.unwrap_or_default(),
        )
    }

    fn against(&self, against: &AgainstUniform) -> String {
        let skew = self.skew.map_or(String::new(), |skew| skew.to_string());
        format!(
            "{skew} runs at {:.2}x of uniform, which takes {}; the busiest expert has {:.1}x the mean, of uniform {:.1}x\n",
            against.ratio,
            units::seconds(against.uniform.as_secs_f64()),
            against.busiest[0],
            against.busiest[1],
        )
    }

    fn cells(&self, launch: &LaunchTime) -> Vec<Cell> {
        let time = launch.time.as_secs_f64();
        let roofline = self.roofline(launch);
        vec![
            launch.label.as_str().into(),
            units::seconds(time).into(),
            percent(launch.spread).into(),
            units::short(launch.work.flops / time / 1e9).into(),
            units::short(launch.work.bytes / time / 1e9).into(),
            roofline.map_or("-".to_string(), units::seconds).into(),
            Share::new(roofline, time).text().into(),
        ]
    }

    fn sum(&self, run: &Run) -> Vec<Cell> {
        let time = run.time().as_secs_f64();
        let work = run
            .launches
            .iter()
            .fold(moesaic::plan::Work::default(), |sum, l| sum + l.work);
        let roofline = self.roofline_of(run);
        let bold = |text: String| Cell::styled(&text, "1");
        vec![
            bold("the layer".to_string()),
            bold(units::seconds(time)),
            bold(percent(run.spread)),
            bold(units::short(work.flops / time / 1e9)),
            bold(units::short(work.bytes / time / 1e9)),
            bold(roofline.map_or("-".to_string(), units::seconds)),
            bold(Share::new(roofline, time).text()),
        ]
    }

    /// Returns the roofline of a launch: the shortest time that the machine allows, in seconds.
    fn roofline(&self, launch: &LaunchTime) -> Option<f64> {
        let machine = &self.limits.as_ref()?.machine;
        let plan = self.layer.plan();
        let roofs = machine.roofs(arithmetic(&plan.kernels[launch.kernel], &plan.spec));
        Some(launch.work.floor(&roofs).seconds)
    }

    /// Returns the share of every launch, and that of the whole layer.
    fn shares(&self, run: &Run) -> impl Iterator<Item = Share> {
        let own =
            |launch: &LaunchTime| Share::new(self.roofline(launch), launch.time.as_secs_f64());
        let whole = Share::new(self.roofline_of(run), run.time().as_secs_f64());
        run.launches.iter().map(own).chain([whole])
    }

    fn roofline_of(&self, run: &Run) -> Option<f64> {
        run.launches
            .iter()
            .map(|launch| self.roofline(launch))
            .sum()
    }

    /// Returns the report as JSON, for scripts.
    pub fn json(&self) -> Value {
        let device = self.engine.device_info();
        json!({
            "layer": self.layer.spec().name,
            "target": self.engine.target().to_string(),
            "device": device.name,
            "units": device.units,
            "machine": self.limits.as_ref().map(|limits| machine_json(&limits.machine)),
            "steady": self.limits.as_ref().map(|limits| limits.moved.is_empty()),
            "y_error": self.error,
            "tuned_for": self.tuned().collect::<Vec<_>>(),
            "skew": self.skew.map(|skew| skew.to_string()),
            "runs": self.runs.iter().map(|run| self.run_json(run)).collect::<Vec<_>>(),
        })
    }

    fn run_json(&self, run: &Run) -> Value {
        let launch = |launch: &LaunchTime| {
            let (time, roofline) = (launch.time.as_secs_f64(), self.roofline(launch));
            json!({
                "launch": launch.label,
                "kernel": self.layer.plan().kernels[launch.kernel].name,
                "seconds": time,
                "spread": launch.spread,
                "flops": launch.work.flops,
                "bytes": launch.work.bytes,
                "roofline_seconds": roofline,
                "of_roofline": Share::new(roofline, time).value(),
                "no_share": no_share(roofline, time),
            })
        };
        let (time, roofline) = (run.time().as_secs_f64(), self.roofline_of(run));
        let against = |against: &AgainstUniform| {
            json!({
                "uniform_seconds": against.uniform.as_secs_f64(),
                "of_uniform": against.ratio,
                "busiest_of_mean": against.busiest[0],
                "uniform_busiest_of_mean": against.busiest[1],
            })
        };
        json!({
            "tokens": run.tokens,
            "repeats": run.repeats,
            "seconds": time,
            "call_seconds": run.call.as_secs_f64(),
            "tokens_per_second": run.tokens as f64 / time,
            "roofline_seconds": roofline,
            "spread": run.spread,
            "of_roofline": Share::new(roofline, time).value(),
            "no_share": no_share(roofline, time),
            "against_uniform": run.against.as_ref().map(against),
            "launches": run.launches.iter().map(launch).collect::<Vec<_>>(),
        })
    }
}

fn percent(part: f64) -> String {
    format!("{:.0} %", 100.0 * part)
}

/// Returns the reason that a time has no share of its roofline, if it has none.
fn no_share(roofline: Option<f64>, time: f64) -> Option<&'static str> {
    (Share::new(roofline, time) == Share::Faster).then_some(FASTER)
}
