//! The place of published meshes among those that a search ranks: docs/SCALE.md has the table.
//!
//! ```sh
//! cargo run --release -p moesaic-planner --example meshes
//! ```

use std::process::ExitCode;

fn main() -> ExitCode {
    let ranks = match moesaic_planner::validate::mesh_ranks() {
        Ok(ranks) => ranks,
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::from(2);
        }
    };
    for rank in ranks {
        let place = rank
            .place
            .map_or("does not fit".to_string(), |at| at.to_string());
        let behind = rank.behind.map_or(String::new(), |part| {
            format!(", {:.1} % behind", 100.0 * part)
        });
        let best = rank.best.map_or(String::new(), |mesh| mesh.to_string());
        println!(
            "{:<40} {:<32} place {place} of {}{behind}; best {best}",
            rank.point,
            rank.mesh.to_string(),
            rank.of
        );
    }
    ExitCode::SUCCESS
}
