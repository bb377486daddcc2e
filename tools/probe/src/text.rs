//! Kernel text: the probe's kernels over the prelude of real kernels.

use crate::bench::Trouble;
use moesaic_kernel::Target;
use serde::Serialize;
use tera::{Context, Tera};

macro_rules! kernels {
    ($($name:literal),* $(,)?) => {
        [$((concat!("probe/", $name), include_str!(concat!("../kernels/", $name, ".tera")))),*]
    };
}

const KERNELS: [(&str, &str); 11] = kernels![
    "cluster.cu",
    "convert.cu",
    "copy.cu",
    "matrix.cu",
    "mbarrier.cu",
    "mma.cu",
    "roles.cu",
    "tile.cu",
    "tma.cu",
    "warp.cu",
    "wgmma.cu",
];

/// The target's variables that the prelude uses.
#[derive(Serialize)]
struct TargetText {
    backend: &'static str,
    dialect: &'static str,
    arch: String,
    wave: u32,
    capability: u16,
    bf16_rounding: bool,
    warp_max: bool,
    dependent_launches: bool,
}

/// The variables of a desc that the prelude uses.
#[derive(Serialize)]
struct Desc<'a> {
    activations: &'a str,
}

/// Returns the compute capability times ten, or 0 for a target that is no
/// NVIDIA GPU.
pub fn capability(target: Target) -> u16 {
    match target.hardware() {
        Target::Cuda(arch) => arch.capability,
        _ => 0,
    }
}

/// Renders a kernel file. `activations` chooses among the prelude's GEMMs.
///
/// # Errors
/// [`Trouble::Text`] if a template is wrong.
pub fn render(
    file: &str,
    target: Target,
    activations: &str,
    mut context: Context,
) -> Result<String, Trouble> {
    let hardware = target.hardware();
    let caps = target.caps();
    let facts = TargetText {
        backend: hardware.backend(),
        dialect: "cuda",
        arch: hardware.arch(),
        wave: 32,
        capability: capability(target),
        bf16_rounding: caps.is_some_and(|caps| caps.bf16_rounding),
        warp_max: caps.is_some_and(|caps| caps.warp_max),
        dependent_launches: caps.is_some_and(|caps| caps.dependent_launches),
    };
    context.insert("target", &facts);
    context.insert("d", &Desc { activations });
    let wrong = |error: tera::Error| Trouble::Text(format!("{file}: {error}"));
    let mut tera = Tera::new();
    tera.autoescape_on(Vec::<&'static str>::new());
    let all = moesaic_templates::GPU.iter().copied().chain(KERNELS);
    tera.register_filter("f32", |value: f64, _: tera::Kwargs, _: &tera::State| {
        format!("{value:?}f")
    });
    // Names of custom activations, which no kernel of the probe has.
    for name in ["calls", "vec_value", "vec_slope", "value", "slope"] {
        tera.register_filter(name, |text: String, _: tera::Kwargs, _: &tera::State| text);
    }
    tera.add_raw_templates(all).map_err(wrong)?;
    tera.render(&format!("probe/{file}"), &context)
        .map_err(wrong)
}
