//! Opens files to map them.

use crate::WeightsError;
use std::fs::{self, File};
use std::path::Path;

/// Opens a regular file. A pipe has no bytes to map, and opening one waits for its writer.
pub(crate) fn open(path: &Path) -> Result<File, WeightsError> {
    let about = fs::metadata(path).map_err(WeightsError::io(path))?;
    if !about.is_file() {
        let path = path.to_path_buf();
        return Err(WeightsError::NotRegular { path });
    }
    File::open(path).map_err(WeightsError::io(path))
}
