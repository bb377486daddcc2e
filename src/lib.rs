//! moesaic
