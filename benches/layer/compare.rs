//! Who computes the same as we do; only they are timed.

use crate::Result;
use crate::answer;
use crate::data::Folder;
use crate::here::Run;
use crate::pass::Pass;
use crate::peer::{Peer, Variant};
use std::path::Path;

/// For each variant whether it agrees with us; a line for each that does not.
pub fn all(
    run: &Run<'_>,
    peers: &mut [Peer],
    variants: &[Variant],
    input: &Path,
    folder: &Folder,
    pass: Pass,
) -> Result<Vec<bool>> {
    run.once()?;
    for peer in peers.iter_mut() {
        // A peer that cannot says so again when it is to run.
        let _ = peer.ask(&format!("input {}", input.display()));
    }
    let mut agree = Vec::new();
    for variant in variants {
        let path = folder.answer();
        let order = format!("check {} {pass} {}", variant.name, path.display());
        let answer = peers[variant.peer].ask(&order);
        let result = answer.and_then(|_| one(run, &path));
        if let Err(problem) = &result {
            println!("# {} is left out: {problem}", variant.title);
        }
        agree.push(result.is_ok());
    }
    Ok(agree)
}

/// # Errors
/// What differs, and by how much.
fn one(run: &Run<'_>, path: &Path) -> Result {
    answer::agrees(path, run.dtype(), |name| match name.strip_prefix("grad.") {
        // A row of an expert with few tokens can cancel to almost nothing.
        Some(weight) => run.gradient(weight).map(|ours| Some((ours, None))),
        None => Ok(Some((run.rows(name)?, Some(run.width())))),
    })
}
