//! Runs inputs of one kind, or kept ones.

use crate::{Options, parent};
use moesaic_fuzz::{Fault, Watch, input, surface};
use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;

/// Number of faults of one kind after which a run ends; more teach nothing new.
const ENOUGH: usize = 20;

/// Runs the inputs; returns true if nothing failed.
pub fn run(options: &Options) -> Result<bool, String> {
    let watch = Watch::new();
    if !options.files.is_empty() {
        let mut well = true;
        for file in &options.files {
            well &= one_file(&watch, file)?;
        }
        return Ok(well);
    }
    let name = options
        .surface
        .as_deref()
        .ok_or("a child has one surface")?;
    numbered(&watch, options, name)
}

fn one_file(watch: &Watch, path: &Path) -> Result<bool, String> {
    let folder = path
        .parent()
        .and_then(|folder| folder.file_name())
        .unwrap_or_default();
    let folder = folder.to_string_lossy();
    let mut surface = surface(&folder).ok_or_else(|| format!("no surface is called {folder}"))?;
    surface.begin();
    let bytes = fs::read(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let done = watch.check(&mut *surface, &bytes);
    if let Err(Fault(reason)) = &done {
        println!("FAILED {}: {reason}", path.display());
    }
    Ok(done.is_ok())
}

fn numbered(watch: &Watch, options: &Options, name: &str) -> Result<bool, String> {
    let mut surface = surface(name).ok_or("the surface is known")?;
    let at = options.at.as_deref().ok_or("a child says where it is")?;
    let mut at = File::create(at).map_err(|error| error.to_string())?;
    surface.begin();
    let (mut accepted, mut faults) = (0, 0);
    for number in options.first..options.first + options.inputs {
        let told = at
            .seek(SeekFrom::Start(0))
            .and_then(|_| at.write_all(&number.to_le_bytes()));
        told.map_err(|error| error.to_string())?;
        let bytes = input(&mut *surface, options.seed, number);
        match watch.check(&mut *surface, &bytes) {
            Ok(answer) => accepted += u64::from(answer),
            Err(Fault(reason)) => {
                let again = parent::kept(options, name, number, &bytes)?;
                println!(
                    "FAILED {name}, seed {}, input {number}: {reason}\n  {again}",
                    options.seed
                );
                faults += 1;
            }
        }
        if faults == ENOUGH {
            break;
        }
    }
    println!(
        "{name}: {} inputs, {accepted} accepted, {faults} failed",
        options.inputs
    );
    Ok(faults == 0)
}
