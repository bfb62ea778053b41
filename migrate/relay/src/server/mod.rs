//! The listening end: accepts links and groups them into sessions, each with its target.
//!
//! A [`Server`] runs its sessions in this process. A [`Front`] has a process for each session: it
//! opens the sessions and passes their links on, and a `Server` in that process runs the session.

mod allowance;
mod answer;
mod config;
mod front;
mod greeting;
mod hello;
mod measure;
mod run;
mod shortage;
mod state;
mod targets;
mod waiting;

pub use allowance::Allowance;
pub use config::{Host, ServerConfig};
pub use front::{Front, FrontConfig, Switchboard};
pub use state::{Promise, Server};
