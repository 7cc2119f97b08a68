"""The extension module: importing it registers `torch.ops.muon`."""
