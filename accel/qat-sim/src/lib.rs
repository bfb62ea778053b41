//! A simulated QAT device behind the C interface of qatlib.
