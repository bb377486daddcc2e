//! Recordings of launches and exchanges, and when each one ran.
//!
//! [`Layer::record`](crate::Layer::record) takes a [`Trace`], or a [`Recorder`] of yours.
//! [`Layer::time_steps`](crate::Layer::time_steps) times the launches of one call without one.

/// A recorder that keeps all events, for Chrome's trace viewer and Perfetto.
///
/// ```
/// use moesaic::trace::{Recorder, Trace, chrome_trace};
/// use std::sync::Arc;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # use moesaic::example::{engine, spec, weights};
/// let mut layer = engine().layer(&spec(), &weights())?;
/// let trace = Arc::new(Trace::default());
/// layer.record(Some(trace.clone()));
/// let x = vec![1.0f32; 3 * layer.spec().shape.model_dim];
/// layer.forward(&moesaic::Input::new(3, &x))?;
/// assert!(trace.recorded().iter().any(|r| r.activity.name == "grouped_gemm_down"));
/// let file = chrome_trace(trace.events(0)); // of rank 0
/// assert!(file["traceEvents"].as_array().is_some_and(|events| events.len() > 5));
/// # Ok(())
/// # }
/// ```
#[doc(inline)]
pub use moesaic_engine::Trace;

/// A receiver of launch and exchange events, such as a [`Trace`].
///
/// ```
/// use moesaic::trace::{Activity, Recorder};
/// use std::time::Instant;
///
/// struct Slowest(std::sync::Mutex<(f64, String)>);
///
/// impl Recorder for Slowest {
///     fn ended(&self, activity: &Activity, begin: Instant, end: Instant) {
///         let mut slowest = self.0.lock().unwrap();
///         let seconds = (end - begin).as_secs_f64();
///         if seconds > slowest.0 {
///             *slowest = (seconds, activity.name.clone());
///         }
///     }
/// }
/// ```
#[doc(inline)]
pub use moesaic_engine::Recorder;

/// A launch, or a collective operation of ranks.
///
/// ```
/// use moesaic::mesh::OverlapBy;
/// use moesaic::trace::{Activity, Lane, Chunk};
///
/// let rows = Activity {
///     lane: Lane::Exchange,
///     name: "rows".to_string(),
///     chunk: Some(Chunk { number: 0, of: 4, by: OverlapBy::Rows }),
///     bytes: 4096,
/// };
/// assert_eq!(rows.chunk.unwrap().to_string(), "1 of 4");
/// ```
#[doc(inline)]
pub use moesaic_engine::Activity;

/// A timeline whose activities run one after the other, such as a device's stream.
///
/// ```
/// assert_eq!(moesaic::trace::Lane::Exchange.name(), "exchange");
/// ```
#[doc(inline)]
pub use moesaic_engine::Lane;

/// A finished activity with its start and end.
///
/// ```
/// use moesaic::trace::{Recorded, Trace};
///
/// let seconds = |of: &Recorded| (of.end - of.begin).as_secs_f64();
/// assert_eq!(Trace::default().recorded().iter().map(seconds).sum::<f64>(), 0.0);
/// ```
#[doc(inline)]
pub use moesaic_engine::Recorded;

/// Writes the events of any number of ranks as a trace file.
///
/// ```
/// use moesaic::trace::{Trace, chrome_trace};
///
/// let ranks = [Trace::default(), Trace::default()];
/// let events = ranks.iter().enumerate().flat_map(|(rank, trace)| trace.events(rank));
/// let text = chrome_trace(events.collect()).to_string();
/// assert!(text.contains("rank 1"));
/// ```
#[doc(inline)]
pub use moesaic_engine::chrome_trace;

/// A chunk of the rows that ranks exchange for their experts.
///
/// ```
/// use moesaic::mesh::OverlapBy;
/// use moesaic::trace::Chunk;
///
/// // Of eight groups of ranks the second of four chunks has those next to a rank.
/// let chunk = Chunk { number: 1, of: 4, by: OverlapBy::Peers };
/// assert_eq!(chunk.distances(8), 1..3);
/// ```
#[doc(inline)]
pub use moesaic_plan::Chunk;

/// The time of one launch, as [`Layer::time_steps`](crate::Layer::time_steps) measures it.
///
/// ```
/// use moesaic::Input;
/// use moesaic::trace::StepTime;
///
/// # use moesaic::example::{engine, spec, wave, weights};
/// # fn main() -> Result<(), moesaic::Error> {
/// let layer = engine().layer(&spec(), &weights())?;
/// layer.forward(&Input::new(3, &wave(24)))?;
/// let steps: Vec<StepTime> = layer.time_steps(3)?; // the same call again
/// let slowest = steps.iter().max_by_key(|step| step.time);
/// assert!(slowest.is_some_and(|step| !step.symbol.is_empty()));
/// # Ok(())
/// # }
/// ```
#[doc(inline)]
pub use moesaic_engine::StepTime;
