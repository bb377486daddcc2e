//! The kernel store that a command works on.

use crate::console::Console;
use crate::units;
use clap::Args;
use moesaic::Store;
use moesaic::cache::Tuned;
use std::path::PathBuf;
use std::sync::Arc;

/// The options that choose the store of a command.
#[derive(Args, Debug, Default)]
pub struct StoreArgs {
    /// The kernel cache, instead of MOESAIC_CACHE or ~/.cache/moesaic
    #[arg(long, value_name = "DIR")]
    pub cache: Option<PathBuf>,
}

impl StoreArgs {
    /// Opens the store. If the store cannot be used, a warning says so and the command goes on
    /// without it.
    pub fn open(&self, console: &Console) -> Arc<Store> {
        let store = self.find();
        if let Some(trouble) = store.trouble() {
            console.warn(&trouble.to_string().replace('\n', "\n  "));
            // The store would repeat this warning for every kernel.
            crate::log::given("going on without the kernel cache");
        }
        store
    }

    /// Opens the store without a warning.
    pub fn find(&self) -> Arc<Store> {
        Arc::new(match &self.cache {
            Some(dir) => Store::open(dir),
            None => Store::open_default(),
        })
    }
}

/// Describes in one line what a tuning is for.
pub fn tuning(tuned: &Tuned) -> String {
    let tokens = tuned.buckets.iter().map(|bucket| bucket.tokens.to_string());
    format!(
        "{} on {} is tuned for T={}, {} of {}",
        tuned.name,
        tuned.target,
        tokens.collect::<Vec<_>>().join(","),
        units::count(tuned.machine.threads as usize, "thread"),
        tuned.machine.name
    )
}

/// Returns the location of a store for messages.
pub fn place(store: &Store) -> String {
    if store.dir().as_os_str().is_empty() {
        "no cache".to_string()
    } else {
        store.dir().display().to_string()
    }
}
