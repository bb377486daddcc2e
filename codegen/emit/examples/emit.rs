//! Prints the kernels of a spec: `emit SPEC.json TARGET [KERNEL]`.

use moesaic_plan::{PlanOptions, plan};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().collect();
    let spec = serde_json::from_str(&std::fs::read_to_string(&args[1])?)?;
    let plan = plan(&spec, args[2].parse()?, &PlanOptions::default())?;
    for kernel in &plan.kernels {
        if args.get(3).is_none_or(|name| *name == kernel.name) {
            print!("{}", moesaic_emit::emit(kernel, plan.target)?.text);
        }
    }
    Ok(())
}
