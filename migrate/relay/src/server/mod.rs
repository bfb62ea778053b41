//! The listening end: links come in, sessions form, each to its target.

mod config;
mod hello;
mod run;
mod state;

pub use config::{Host, ServerConfig};
pub use state::Server;
