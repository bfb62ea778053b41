//! The choice of scenarios: all, those with a name, the quick choice, measurements, one shard.
//!
//! The quick choice is that of `make test`: every promise of SPECIFICATION.md that needs a whole
//! VM, at its simplest. Of the matrix of failures it has each pair of phase and QEMU version, each
//! pair of victim and version, and each outcome.

use anyhow::{ensure, Result};
use vm_tests::Shard;

use crate::Scenario;

/// The quick choice outside of the matrix, which defines its own.
const QUICK: &[&str] = &[
    "guest_finds_one_wrong_bit",
    "qemu_alone_moves_a_dirtying_guest_by_multifd",
    "moves_idle_single_zstd",
    "moves_dirtying_defaults",
    "moves_dirtying_8_channels_zstd",
    "moves_whatever_was_set_before",
    "moves_insecure_2_channels",
    "auto_with_incompressible_memory",
    "auto_with_a_simulated_qat_device",
    "qatzip_on_a_simulated_device_erring",
    "a_simulated_device_that_lies_costs_the_migration_at_most",
    "qatzip_without_a_device_is_software_or_refused",
    "qpl_by_intel_s_library_in_software",
    "qpl_without_its_library_is_software_or_refused",
    "qemu_7_rehearsal_killed_before_switchover",
    "advice_for_a_running_vm_changes_nothing",
    "cancel_by_ctrl_c_2_channels",
    "cancel_by_monitor_0_channels",
    "receive_killed_2_channels",
    "receive_frozen_2_channels",
    "two_at_once_through_one_receive",
    "evacuates_all_but_the_one_that_fails",
    "relay_2_channels",
    "intruders_are_turned_away_and_harm_nobody",
    "receive_serves_the_vms_it_allows_and_no_other",
    "nothing_starts_without_certificates",
    "survives_a_link_cut_of_1_s_2_channels",
    "survives_delays_reordering_and_cuts_0_channels",
    "moves_with_multifd_deltas_over_a_link_that_is_cut",
    "cancelled_while_the_link_is_away",
    "noise_on_the_port_harms_nobody",
    "nobody_listens_at_the_peer_address",
    "the_peer_is_silent",
    "the_destination_has_other_memory",
    "qemu_7_to_10_2_channels",
    "qemu_10_to_10_multifd_zstd_passes",
    "qemu_7_to_7_xbzrle_passes",
    "qemu_7_cancel_in_device",
    "qemu_10_pause_before_switchover_2_channels",
    "qemu_10_postcopy_preempt",
    "qemu_7_postcopy_by_migrate",
    "qemu_10_colo_is_refused",
    "a_guest_that_does_not_converge_is_reported",
    "saved_7_to_7_runs_at_once",
    "saved_10_to_10_runs_at_once",
    "saved_10_to_10_survives_the_death_of_players",
    "seed_7_single_need_not_cross",
    "saved_7_clones_of_a_killed_player_have_every_page",
    "intercepts_a_migration_to_an_address",
    "proxmox_sequence",
    "proxmox_while_the_rules_go",
    "proxmox_destination_carrier_killed_when_the_source_has_completed",
];

/// The parsed command line.
#[derive(Debug, Default)]
pub(crate) struct Choice {
    /// Only list them.
    pub(crate) list: bool,
    quick: bool,
    /// Only those that measure, or none of them.
    measurements: Option<bool>,
    pub(crate) shard: Shard,
    names: Vec<String>,
}

impl Choice {
    /// Parses the arguments. Flags of the standard harness that `cargo test` may pass on
    /// (`--nocapture` and the like) are ignored.
    pub(crate) fn new(words: impl Iterator<Item = String>) -> Result<Self> {
        let mut choice = Self::default();
        for word in words {
            match word.split_once('=').unwrap_or((&word, "")) {
                ("--list", _) => choice.list = true,
                ("--quick", _) => choice.quick = true,
                ("--only-measurements", _) => choice.measurements = Some(true),
                ("--without-measurements", _) => choice.measurements = Some(false),
                ("--shard", shard) => choice.shard.set(shard)?,
                ("--claims", folder) => choice.shard.share(folder),
                (flag, _) if flag.starts_with('-') => {}
                _ => choice.names.push(word),
            }
        }
        Ok(choice)
    }

    /// The chosen scenarios, of all shards.
    ///
    /// # Errors
    /// If the quick choice names a scenario that does not exist.
    pub(crate) fn of(&self, all: Vec<Scenario>) -> Result<Vec<Scenario>> {
        for name in QUICK {
            let exists = all.iter().any(|scenario| scenario.name == *name);
            ensure!(exists, "the quick choice names {name}, which is no scenario");
        }
        let named = |s: &Scenario| {
            self.names.is_empty() || self.names.iter().any(|name| s.name.contains(name))
        };
        let is_quick = |s: &Scenario| s.quick || QUICK.contains(&s.name.as_str());
        let wanted = |s: &Scenario| self.measurements.is_none_or(|only| only == s.measures);
        let chosen = all.into_iter().filter(|scenario| {
            named(scenario) && wanted(scenario) && (!self.quick || is_quick(scenario))
        });
        Ok(chosen.collect())
    }
}
