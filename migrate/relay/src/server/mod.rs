//! The listening end: accepts links and groups them into sessions, each with its target.

mod config;
mod hello;
mod run;
mod state;
mod waiting;

pub use config::{Host, ServerConfig};
pub use state::Server;
