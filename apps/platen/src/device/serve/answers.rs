//! A server's answers on the control socket and to Prometheus.

use super::open::Opened;
use super::supervisor::Supervisor;
use crate::device::backing::Refused;
use crate::device::claims::Left;
use crate::device::endpoint::Endpoint;
use crate::device::inherited::Inherited;
use crate::device::offload::Why;
use crate::device::plan::Plan;
use crate::device::status::{Status, Transport};
use crate::device::{control, metrics, writeback};
use crate::say::say;
use device::Device;
use nbd::Server;
use policy::Policy;
use std::fmt::Display;
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::sync::{Arc, OnceLock};

/// State for the answers.
pub(super) struct Answers {
    name: String,
    /// Transports other than our own NBD socket; each has one client.
    others: Vec<Transport>,
    /// Address of our own NBD socket.
    address: Option<String>,
    device: Arc<Device>,
    nbd: Arc<Server<Device>>,
    /// The policy, once it runs.
    policy: Arc<OnceLock<Policy>>,
    /// Whether the policy is enabled.
    enabled: bool,
    refused: Refused,
    files: Left,
    /// Why no accelerator compresses, if one may.
    unaccelerated: Arc<Why>,
    generation: u64,
    /// Whether a supervisor created the store; that is a generation without a server.
    supervised: bool,
}

impl Answers {
    pub(super) fn new(
        plan: &Plan<'_>,
        inherited: &Inherited,
        supervisor: &Supervisor,
        opened: &Opened,
        policy: &Arc<OnceLock<Policy>>,
        files: Left,
    ) -> Self {
        let one =
            |kind: &str, address: String| Transport { kind: kind.into(), address, connections: 1 };
        let ublk = opened.disk.as_ref();
        let ublk = ublk.map(|disk| one("ublk", disk.disk().display().to_string()));
        let client = inherited.disk.clone().map(|disk| one("kernel-nbd", disk));
        let file = opened.place.as_ref().map(|place| one("fuse", place.display().to_string()));
        Self {
            name: plan.args.name.clone(),
            others: [ublk, client, file].into_iter().flatten().collect(),
            address: plan.args.nbd.as_ref().map(ToString::to_string),
            device: Arc::clone(&opened.device),
            nbd: Arc::clone(&opened.nbd),
            policy: Arc::clone(policy),
            enabled: plan.policy.enabled,
            refused: Arc::clone(&opened.refused),
            files,
            unaccelerated: Arc::clone(opened.offload.why()),
            generation: opened.store.generation(),
            supervised: supervisor.is_there(),
        }
    }

    /// Starts answering. A server that `replaces` another one continues without an endpoint that
    /// fails.
    pub(super) fn start(
        self,
        control: UnixListener,
        metrics: Option<TcpListener>,
        replaces: bool,
    ) -> anyhow::Result<(Option<Endpoint>, Option<Endpoint>)> {
        let this = Arc::new(self);
        let asked = Arc::clone(&this);
        let control = match control::start(control, move |question| asked.answer(question)) {
            Err(error) if replaces => {
                serve_without("control socket", &error);
                None
            }
            control => Some(control?),
        };
        let metrics = match metrics.map(|listener| metrics::start(listener, move || this.status()))
        {
            Some(Err(error)) if replaces => {
                serve_without("metrics", &error);
                None
            }
            metrics => metrics.transpose()?,
        };
        Ok((control, metrics))
    }

    fn answer(&self, question: &str) -> Option<String> {
        let policy = self.policy.get();
        match question.split_once(' ') {
            None if question == "stat" => {
                Some(serde_json::to_string(&self.status()).expect("numbers and strings"))
            }
            Some(("writeback", what)) => {
                Some(writeback::ask(policy, self.enabled, self.generation, what))
            }
            Some(("written", ticket)) => Some(writeback::told(policy, self.generation, ticket)),
            _ => None,
        }
    }

    fn status(&self) -> Status {
        let nbd = self.address.clone().map(|address| Transport {
            kind: "nbd".into(),
            address,
            connections: self.nbd.connections(),
        });
        let transports = self.others.iter().cloned().chain(nbd).collect();
        let refused = self.refused.get().map(String::as_str);
        let policy = self.policy.get();
        // Before the device is asked: one that starts in between then counts as started.
        let unaccelerated = self.unaccelerated.get();
        let mut status = Status::of(&self.name, &self.device, transports, policy, refused);
        status.unaccelerated = unaccelerated.filter(|_| status.accelerator.is_none());
        status.platen.generation -= u64::from(self.supervised);
        status.removed = self.files.missing().map(|path| path.display().to_string()).collect();
        status
    }
}

/// Logs what a replacement server continues without.
pub(super) fn serve_without(what: &str, error: &dyn Display) {
    say(&format!("no {what}: {error}; stored pages are served without"));
}
