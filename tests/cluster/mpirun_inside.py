"""`bigbatch launch mpirun` in the first node of an emulated cluster, whose other nodes it reaches as by ssh.

`mpirun_inside.py FOLDER WORD ...`, started in every node; FOLDER is for what mpirun writes.
"""

import os
import sys

from bigbatch.launch.jobs import foreground
from bigbatch.launch.launchers import mpirun
from bigbatch.launch.start import main
from bigbatch.tools.emulate.launchers import AGENT

if os.environ["RANK"] != "0":
    sys.exit(0)
settings = {"plm": "ssh", "plm_ssh_agent": f"{sys.executable} -m {AGENT}", "prte_tmpdir_base": sys.argv[1]}
os.environ.update({f"PRTE_MCA_{name}": value for name, value in settings.items()})
foreground.MORE_HOSTS_SECONDS = 2.0
mpirun.ANSWER_SECONDS = 12.0
sys.exit(main(["mpirun", *sys.argv[2:]]))
