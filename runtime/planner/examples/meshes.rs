//! The place of published meshes among those that a search ranks: docs/SCALE.md has the table.
//!
//! ```sh
//! cargo run --release -p moesaic-planner --example meshes
//! ```

use moesaic_planner::validate::{MeshRankLine, mesh_ranks};
use std::process::ExitCode;

fn main() -> ExitCode {
    let ranks = match mesh_ranks() {
        Ok(ranks) => ranks,
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::from(2);
        }
    };
    for rank in ranks {
        let place = |at: Option<usize>| at.map_or("does not fit".to_string(), |at| at.to_string());
        println!(
            "{}: place {} of {}, {} tie; by time alone {}",
            rank.point,
            place(rank.place),
            rank.of,
            rank.tied,
            place(rank.by_time)
        );
        let lines = [("published", &rank.found), ("first", &rank.first)];
        for (name, line) in lines {
            if let Some(line) = line {
                println!("  {name:<9} {}", words(line));
            }
        }
    }
    ExitCode::SUCCESS
}

fn words(line: &MeshRankLine) -> String {
    format!(
        "{:<32} {:.1} % longer than the fastest, {:.0} % of the memory",
        line.mesh.to_string(),
        100.0 * line.behind,
        100.0 * line.memory
    )
}
