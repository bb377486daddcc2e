//! An inspection for the terminal.

use super::model::{InspectedKernel, InspectedLaunch, Inspection, LaunchSize};
use crate::machine::MachineLimits;
use crate::palette::Palette;
use crate::table::{Cell, Table};
use crate::units;
use moesaic::LayerSpec;
use moesaic::cache::{Bucket, Tuned};
use moesaic::kernel::Access;
use moesaic::plan::{LayerPlan, TensorRole};
use moesaic::spec::{CapacityMode, Renormalize, Score};
use moesaic::target::KernelReport;
use std::iter;

/// Renders every table.
pub fn render(inspection: &Inspection, palette: &Palette) -> String {
    let title = format!("{} on {}", inspection.plan.spec.name, inspection.target);
    let counted = inspection.counted.as_ref();
    let counted = counted.map(|counted| section(&counted.title(), counted.table(), palette));
    let parts = [
        format!("{}\n{}", palette.bold(&title), indent(&summary(inspection))),
        section("plan", plan(inspection), palette),
        section("kernels", kernels(inspection), palette),
        section(
            "launches: blocks of the grid",
            geometry(inspection),
            palette,
        ),
        section(&roofline_title(inspection), roofline(inspection), palette),
    ];
    let parts: Vec<String> = parts.into_iter().chain(counted).collect();
    parts.join("\n")
}

fn section(title: &str, table: Table, palette: &Palette) -> String {
    format!("{}\n{}", palette.bold(title), table.render(palette))
}

fn indent(lines: &[String]) -> String {
    lines.iter().map(|line| format!("  {line}\n")).collect()
}

/// Describes the layer in a few lines.
pub fn summary(inspection: &Inspection) -> Vec<String> {
    let (spec, plan) = (&inspection.plan.spec, &inspection.plan);
    let weights = plan
        .tensors
        .iter()
        .filter(|tensor| tensor.role == TensorRole::Weight);
    let bytes = weights.map(|tensor| tensor.bytes(0)).sum();
    let mut lines = vec![
        shape(spec),
        format!("router: {}", router(spec)),
        format!(
            "{} of weights ({}), {} in {}",
            units::bytes(bytes),
            spec.precision.weights,
            launches(plan),
            units::count(plan.kernels.len(), "kernel"),
        ),
    ];
    lines.extend(inspection.tuned.iter().flat_map(tuned));
    lines
}

/// Describes the number of launches, and for a layer that trains also the number to evaluate.
fn launches(plan: &LayerPlan) -> String {
    let all = plan.all_steps().count();
    let all = units::count(all, "launch").replace("launchs", "launches");
    match plan.training {
        None => all,
        Some(_) => format!("{all} to train and {} to evaluate", plan.evaluation.len()),
    }
}

/// Describes the sizes that a tuning changes, for each measured number of tokens.
fn tuned(tuned: &Tuned) -> Vec<String> {
    let threads = units::count(tuned.machine.threads as usize, "thread");
    let title = format!("tuned for {threads} of {}", tuned.machine.name);
    let buckets = tuned.buckets.iter().map(bucket);
    iter::once(title).chain(buckets).collect()
}

fn bucket(bucket: &Bucket) -> String {
    let sizes = bucket.sizes.iter();
    let sizes: Vec<String> = sizes.map(|(name, size)| format!("{name} {size}")).collect();
    let what = if sizes.is_empty() {
        "the default sizes are best".to_string()
    } else {
        format!("{}, {:.2}x the default", sizes.join(", "), bucket.gain)
    };
    format!("  T={}: {what}", bucket.tokens)
}

fn shape(spec: &LayerSpec) -> String {
    let shape = &spec.shape;
    let shared = match spec.shared.len() {
        0 => String::new(),
        n => format!(", {n} shared"),
    };
    format!(
        "{} experts{shared}, {} per token, {} -> {} -> {}, activations {}",
        spec.routed_experts(),
        shape.top_k,
        shape.model_dim,
        shape.hidden_dim,
        spec.output_dim(),
        spec.precision.activations,
    )
}

/// Describes the router and the capacity.
pub fn router(spec: &LayerSpec) -> String {
    let kind = spec.router.kind.def().name;
    let score = match spec.router.score {
        Score::Softmax => "softmax",
        Score::SoftmaxSelected => "softmax over the selected",
        Score::Sigmoid => "sigmoid",
        Score::SqrtSoftplus => "sqrt-softplus",
        Score::One => "weight one",
    };
    let groups = spec.router.groups.as_ref();
    let groups = groups.map_or(String::new(), |g| {
        format!(", best {} of {} groups", g.keep, g.count)
    });
    let capacity = match spec.capacity.mode {
        CapacityMode::Dropless => "dropless".to_string(),
        CapacityMode::Factor => format!("capacity factor {}", spec.capacity.factor),
        CapacityMode::Fixed => format!("{} rows per expert", spec.capacity.rows.unwrap_or(0)),
        CapacityMode::MaxCount => "capacity of the largest count".to_string(),
        CapacityMode::Bounded => format!("bounded, factor {}", spec.capacity.factor),
    };
    let renormalize = match spec.router.renormalize {
        Renormalize::None => "",
        _ => ", renormalized",
    };
    let scale = match spec.router.scale {
        1.0 => String::new(),
        scale => format!(", scaled by {scale}"),
    };
    format!("{kind}, {score}{groups}{renormalize}{scale}, {capacity}")
}

fn plan(inspection: &Inspection) -> Table {
    let mut table = Table::new(&[">", "LAUNCH", "WHAT IT DOES", "WRITES"]);
    for launch in &inspection.launches {
        let summary = inspection
            .entry(launch)
            .summary
            .trim_end_matches('.')
            .to_string();
        let writes: Vec<String> = inspection
            .writes(launch)
            .iter()
            .map(|name| inspection.shaped(name))
            .collect();
        table.row([
            launch.number.to_string(),
            launch.label.clone(),
            summary,
            writes.join(", "),
        ]);
    }
    table
}

impl Inspection {
    /// Returns the tensors that a launch writes.
    pub fn writes<'s>(&'s self, launch: &'s InspectedLaunch) -> Vec<&'s str> {
        self.bound(launch, |access| access != Access::Read)
    }

    /// Returns the tensors that a launch reads.
    pub fn reads<'s>(&'s self, launch: &'s InspectedLaunch) -> Vec<&'s str> {
        self.bound(launch, |access| access != Access::Write)
    }

    fn bound<'s>(&'s self, launch: &'s InspectedLaunch, is: fn(Access) -> bool) -> Vec<&'s str> {
        let accesses = self.plan.accesses(&launch.step);
        let bound = accesses.filter(|(_, access)| is(*access));
        bound.map(|(tensor, _)| &*self.plan[tensor].name).collect()
    }

    /// Returns a tensor's name and shape, such as `y [T, 64]`.
    pub fn shaped(&self, name: &str) -> String {
        let Some(tensor) = self.plan.tensor(name) else {
            return name.to_string();
        };
        let sizes: Vec<String> = tensor.shape.iter().map(ToString::to_string).collect();
        format!("{name} [{}]", sizes.join(", "))
    }
}

fn kernels(inspection: &Inspection) -> Table {
    let mut table = Table::new(&[
        "KERNEL", "ENTRY", ">REGS", ">SPILLS", ">STACK", ">SHARED", ">CODE", ">PARAMS", ">COMPILE",
        "CACHE",
    ]);
    for (launch, kernel) in inspection.launched() {
        let (report, entry) = (kernel.report(launch), kernel.entry(launch));
        let number = |n: Option<u64>| n.map_or("-".to_string(), |n| n.to_string());
        let spill_style = if report.is_some_and(KernelReport::spills) {
            "31"
        } else {
            ""
        };
        let shared = report
            .and_then(|r| r.shared_bytes)
            .map(|n| u64::from(n + entry.launch.shared_bytes));
        let params = entry.params.len().to_string();
        let cells: Vec<Cell> = vec![
            kernel.label(&kernel.source.name).into(),
            launch.label.as_str().into(),
            registers(report).into(),
            Cell::styled(&spills(report), spill_style),
            number(report.and_then(|r| r.stack_bytes).map(u64::from)).into(),
            number(shared).into(),
            number(report.and_then(|r| r.code_bytes)).into(),
            params.into(),
            compile_time(kernel).into(),
            state(kernel),
        ];
        table.row(cells);
    }
    table.without_blanks()
}

/// Returns one word for the provider of a tensor.
pub fn role_name(role: TensorRole) -> &'static str {
    match role {
        TensorRole::Input => "input",
        TensorRole::Weight => "weight",
        TensorRole::Packed => "packed",
        TensorRole::Output => "output",
        TensorRole::Scratch => "scratch",
        TensorRole::OutputGradient => "output gradient",
        TensorRole::InputGradient => "input gradient",
        TensorRole::WeightGradient => "weight gradient",
    }
}

/// Returns the registers per thread; for AMD vector and scalar registers.
pub fn registers(report: Option<&KernelReport>) -> String {
    let Some(registers) = report.and_then(|r| r.registers) else {
        return "-".to_string();
    };
    match report.and_then(|r| r.scalar_registers) {
        Some(scalar) => format!("{registers}v {scalar}s"),
        None => registers.to_string(),
    }
}

/// Returns the bytes that are spilled to memory; for AMD also the scalar registers that are spilled
/// to lanes of vector registers.
pub fn spills(report: Option<&KernelReport>) -> String {
    let bytes = report.and_then(|r| r.spill_bytes);
    let bytes = bytes.map_or("-".to_string(), |bytes| bytes.to_string());
    match report.and_then(|r| r.scalar_spills) {
        Some(scalar) if scalar > 0 => format!("{bytes} {scalar}s"),
        _ => bytes,
    }
}

/// Returns the time that the compiler took.
pub fn compile_time(kernel: &InspectedKernel) -> String {
    let artifact = kernel.artifact.as_ref();
    artifact.map_or("-".to_string(), |a| {
        units::seconds(a.report.compile_ms / 1e3)
    })
}

fn state(kernel: &InspectedKernel) -> Cell {
    match (&kernel.artifact, &kernel.problem) {
        (_, Some(_)) => Cell::styled("failed", "31"),
        (Some(_), _) if kernel.cached => "hit".into(),
        (Some(_), _) => Cell::styled("miss", "33"),
        (None, None) => "-".into(),
    }
}

fn geometry(inspection: &Inspection) -> Table {
    let counts: Vec<String> = inspection
        .tokens
        .iter()
        .map(|t| format!(">T={t}"))
        .collect();
    let titles = ["ENTRY", "GRID", ">THREADS", ">SHARED"].into_iter();
    let titles: Vec<&str> = titles.chain(counts.iter().map(String::as_str)).collect();
    let mut table = Table::new(&titles);
    for launch in &inspection.launches {
        let geometry = &inspection.entry(launch).launch;
        let mut cells = vec![
            launch.label.clone(),
            grid_formula(geometry),
            geometry.threads.to_string(),
            geometry.shared_bytes.to_string(),
        ];
        cells.extend(launch.at.iter().map(grid));
        table.row(cells);
    }
    let launched = (0..counts.len()).map(|i| {
        let launches = inspection.launches.iter();
        let some = launches.filter(|launch| launch.at[i].grid.iter().all(|&n| n > 0));
        some.count().to_string()
    });
    let blanks = ["launches", "", "", ""].map(String::from);
    table.row(blanks.into_iter().chain(launched).collect::<Vec<_>>());
    table
}

/// Returns the grid as a formula such as `ceil(T/16) x 4`, or as its only dimension if the other is
/// one.
pub fn grid_formula(launch: &moesaic::kernel::Launch) -> String {
    let [x, y] = launch.grid.each_ref().map(ToString::to_string);
    if y == "1" {
        x
    } else {
        format!("{} x {}", factor(&x), factor(&y))
    }
}

/// Returns a dimension with brackets if it is a sum, because `a+b x c` reads as another number.
fn factor(dimension: &str) -> String {
    let mut depth = 0;
    let is_sum = dimension.chars().any(|c| {
        depth += i32::from(c == '(') - i32::from(c == ')');
        depth == 0 && matches!(c, '+' | '-')
    });
    if is_sum {
        format!("({dimension})")
    } else {
        dimension.to_string()
    }
}

/// Returns the grid at one token count, such as `256 x 4`.
pub fn grid(at: &LaunchSize) -> String {
    match at.grid {
        [x, 1] => x.to_string(),
        [x, y] => format!("{x} x {y}"),
    }
}

fn roofline_title(inspection: &Inspection) -> String {
    let Some(machine) = &inspection.machine else {
        return "arithmetic and traffic (this target's limits are not known; --machine names a GPU)"
            .to_string();
    };
    format!("roofline on {}", roofs(machine))
}

/// Describes a machine and its limits in one line.
pub fn roofs(machine: &MachineLimits) -> String {
    let levels = machine.levels.iter().map(|level| {
        let rate = level.bytes_per_second.map(units::byte_rate);
        match (rate, level.capacity) {
            (Some(rate), None) => rate,
            (Some(rate), Some(bytes)) => {
                format!("{rate} from {} {}", units::bytes(bytes), level.name)
            }
            (None, _) => format!(
                "{} {}",
                units::bytes(level.capacity.unwrap_or(0)),
                level.name
            ),
        }
    });
    let levels: Vec<String> = levels.rev().collect();
    let half = machine.half().map_or(String::new(), |(rate, name)| {
        format!(", {} {name}", units::flop_rate(rate))
    });
    format!(
        "{} ({}: {} {}{half}, {})",
        machine.name,
        machine.origin.name(),
        units::flop_rate(machine.f32_flops),
        machine.f32_name,
        levels.join(", ")
    )
}

fn roofline(inspection: &Inspection) -> Table {
    let mut table = Table::new(&[
        ">T",
        "ENTRY",
        ">FLOP",
        ">TRAFFIC",
        ">FLOP/BYTE",
        ">ROOFLINE",
        "BOUND BY",
    ]);
    for (i, tokens) in inspection.tokens.iter().enumerate() {
        for launch in &inspection.launches {
            let bound = bound(&launch.at[i], inspection.machine.as_ref());
            table.row(roofline_row(&launch.label, &launch.at[i], bound));
        }
        let total = inspection.total(i);
        let roofline = total.1.map_or("-".to_string(), units::seconds);
        table.row(vec![
            Cell::from(tokens.to_string()),
            Cell::styled("sum", "1"),
            units::flops(total.0.flops).into(),
            units::traffic(total.0.bytes).into(),
            units::short(intensity(&total.0)).into(),
            Cell::styled(&roofline, "1"),
            "".into(),
        ]);
    }
    table
}

fn roofline_row(symbol: &str, at: &LaunchSize, bound: &str) -> Vec<Cell> {
    let roofline = at
        .roofline
        .map_or("-".to_string(), |roofline| units::seconds(roofline.seconds));
    vec![
        at.tokens.to_string().into(),
        symbol.into(),
        units::flops(at.work.flops).into(),
        units::traffic(at.work.bytes).into(),
        units::short(intensity(&at.work)).into(),
        roofline.into(),
        bound.into(),
    ]
}

/// Returns the limit that bounds a launch.
pub fn bound<'m>(at: &LaunchSize, machine: Option<&'m MachineLimits>) -> &'m str {
    let bound = machine.zip(at.roofline);
    bound.map_or("-", |(machine, roofline)| machine.bound(roofline.bound))
}

/// Returns the arithmetic intensity, in operations per byte.
pub fn intensity(work: &moesaic::plan::Work) -> f64 {
    if work.bytes > 0.0 {
        work.flops / work.bytes
    } else {
        0.0
    }
}

impl Inspection {
    /// Returns the work of all launches shown, and the sum of their rooflines, at the i-th
    /// token count.
    pub fn total(&self, i: usize) -> (moesaic::plan::Work, Option<f64>) {
        let add = |(work, time): (moesaic::plan::Work, Option<f64>), launch: &InspectedLaunch| {
            let at = launch.at[i];
            let time = time
                .zip(at.roofline)
                .map(|(sum, roofline)| sum + roofline.seconds);
            (work + at.work, time)
        };
        self.launches
            .iter()
            .fold((moesaic::plan::Work::default(), Some(0.0)), add)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sum_in_a_grid_has_brackets() {
        for (dimension, shown) in [
            ("ceil(T*2/384)+min(T*2, 8)", "(ceil(T*2/384)+min(T*2, 8))"),
            ("(T<=64 ? 0 : ceil(T/4)+1)", "(T<=64 ? 0 : ceil(T/4)+1)"),
            ("ceil(T/16)", "ceil(T/16)"),
        ] {
            assert_eq!(factor(dimension), shown);
        }
    }

    #[test]
    fn scalar_registers_that_are_spilled_are_shown() {
        let of = |bytes, scalar| {
            spills(Some(&KernelReport {
                spill_bytes: bytes,
                scalar_spills: scalar,
                ..KernelReport::default()
            }))
        };
        assert_eq!(of(Some(0), Some(38)), "0 38s");
        assert_eq!(of(Some(0), Some(0)), "0");
        assert_eq!(of(Some(16), None), "16");
        assert_eq!(of(None, None), "-");
        assert_eq!(spills(None), "-");
    }
}
