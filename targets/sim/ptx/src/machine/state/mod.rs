//! The state of the units of a cluster, as data. The modules beside this folder carry it on, an
//! instruction at a time.

pub mod barriers;
pub mod bulk;
pub mod copies;
pub mod global;
pub mod products;
pub mod sync;
